"""Environment setup of the batch script: modules, a Python environment, shell lines."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from hpctrain.errors import SpecError


class ShellSetup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setup steps of a batch script, in order of execution."""

    modules: tuple[str, ...] = ()
    """Names for `module load`."""
    conda: str | None = None
    """Name or absolute path of a conda environment."""
    venv: str | None = None
    """Absolute path of a virtual environment."""
    setup: tuple[str, ...] = ()
    """Shell lines, verbatim."""
    teardown: tuple[str, ...] = ()
    """Shell lines to run after the supervisor, verbatim."""

    def __post_init__(self) -> None:
        if self.conda is not None and self.venv is not None:
            raise SpecError(
                f"The ranks can use only one Python environment, but both {self.conda!r} (--conda) and "
                f"{self.venv!r} (--venv) are given. Remove one of them."
            )

    @property
    def environment(self) -> Path | None:
        """Folder of the Python environment; None without an environment, or if only its name is known."""
        path = self.venv or (self.conda if self.conda and is_conda_prefix(self.conda) else None)
        return Path(path) if path else None

    @property
    def python(self) -> str | None:
        """Interpreter of the Python environment, or None."""
        if self.environment is not None:
            return str(self.environment / "bin" / "python")
        # The path is unknown until the environment is activated.
        return "python" if self.conda else None


def is_conda_prefix(value: str) -> bool:
    """True if a value of `conda` is a path, not the name of an environment."""
    return "/" in value or value.startswith("~")
