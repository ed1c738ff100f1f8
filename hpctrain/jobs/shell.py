"""What the batch script readies: modules, an environment of Python, lines of shell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Shell:
    """The preparations of a batch script, in the order in which it makes them."""

    modules: tuple[str, ...] = ()
    """Names for `module load`."""
    conda: str | None = None
    """Name or absolute path of a conda environment."""
    venv: str | None = None
    """Absolute path of a virtual environment."""
    setup: tuple[str, ...] = ()
    """Shell, verbatim."""

    def check(self) -> None:
        """See to it that the preparations do not contradict each other.

        Raises:
            SpecError: they do.
        """
        if self.conda is not None and self.venv is not None:
            raise SpecError(
                f"The ranks run in one environment of Python, but {self.conda!r} (--conda) and "
                f"{self.venv!r} (--venv) are asked for. Leave one of them out."
            )

    @property
    def environment(self) -> Path | None:
        """The folder of the environment; None where there is none, or only its name is known."""
        path = self.venv or (self.conda if self.conda and is_folder_of_conda(self.conda) else None)
        return Path(path) if path else None

    @property
    def python(self) -> str | None:
        """The interpreter of the environment; None where there is none."""
        if self.environment is not None:
            return str(self.environment / "bin" / "python")
        # Only the activated environment knows where it lies.
        return "python" if self.conda else None

    def check_files(self) -> None:
        """See to it that the environment is there.

        Raises:
            SpecError: it is not.
        """
        if self.environment is None or (self.environment / "bin" / "python").exists():
            return
        option = "--venv" if self.venv else "--conda"
        raise SpecError(
            f"{str(self.environment)!r} ({option}) is no environment of Python: it has no bin/python. "
            "Check its path."
        )


def is_folder_of_conda(value: str) -> bool:
    """Whether a value of `conda` is a path, and not the name of an environment."""
    return "/" in value or value.startswith("~")
