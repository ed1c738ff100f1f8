"""Environment setup of the batch script: modules, a Python environment, shell lines."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from hpctrain.errors import SpecError

#: `conda env list` takes about a second, and longer on a busy file system.
_CONDA_LIMIT_S = 30.0


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

    def check_files(self, environ: Mapping[str, str]) -> None:
        # Modules and shell lines may provide conda in the job only.
        if self.conda and self.environment is None and not (self.modules or self.setup):
            _check_conda(self.conda, environ)
        if self.environment is None or (self.environment / "bin" / "python").exists():
            return
        option = "--venv" if self.venv else "--conda"
        raise SpecError(
            f"{str(self.environment)!r} ({option}) is not a Python environment: it has no bin/python. "
            "Check its path."
        )


def _check_conda(name: str, environ: Mapping[str, str]) -> None:
    conda = shutil.which(environ.get("CONDA_EXE") or "conda", path=environ.get("PATH"))
    if conda is None:
        raise SpecError(
            f"The environment {name!r} (--conda) requires conda, which was not found through PATH or "
            "CONDA_EXE. Load the conda module (--module), or set --conda to the path of the environment."
        )
    try:
        listed = subprocess.run(
            [conda, "env", "list", "--json"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_CONDA_LIMIT_S,
            check=True,
        )
        environments = {"base", *(Path(path).name for path in json.loads(listed.stdout)["envs"])}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return  # conda may still work on the nodes.
    if name not in environments:
        raise SpecError(
            f"{conda} has no environment {name!r} (--conda). Available environments: "
            f"{', '.join(sorted(environments))}."
        )


def is_conda_prefix(value: str) -> bool:
    """True if a value of `conda` is a path, not the name of an environment."""
    return "/" in value or value.startswith("~")
