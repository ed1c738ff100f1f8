"""Checks of a job against this machine's files, before anything is written."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec

_SHELL = (".sh", ".bash", ".zsh", ".csh", ".sbatch", ".slurm")


def check_files(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Check that the script can be read, the interpreter run and the run folder written.

    Raises:
        SpecError: one of them cannot.
    """
    _check_script(Path(spec.script))
    if spec.shell.python is None:
        _check_interpreter(Path(spec.python))
    spec.shell.check_files(environ)
    if spec.container is not None:
        spec.container.check_files()
    try:
        _check_run_folder(RunDir(Path(spec.run_dir)), is_array=spec.array is not None)
    except OSError as error:
        raise SpecError(
            f"Cannot access the run folder {spec.run_dir!r} (--run-dir): {error.strerror}. "
            "Choose another folder."
        ) from error


def _check_syntax(script: Path) -> None:
    """Fail for a script with syntax errors, before the job waits in the queue."""
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise SpecError(
            f"The script {str(script)!r} has a syntax error in line {error.lineno}: {error.msg}. "
            "Fix it first."
        ) from None
    except (OSError, ValueError) as error:
        raise SpecError(f"Cannot parse the script {str(script)!r} as Python: {error}.") from None


def _check_script(script: Path) -> None:
    try:
        mode = script.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        hint = "Check its path."
        if shutil.which(script.name):
            hint = f"{script.name!r} is a command; commands are not supported yet. Give the path of a script."
        raise SpecError(f"Script {str(script)!r} not found. {hint}") from None
    except OSError as error:
        raise SpecError(f"Cannot access the script {str(script)!r}: {error.strerror}.") from None
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise SpecError(f"The script {str(script)!r} is {kind}. Give the path of a Python file.")
    if not os.access(script, os.R_OK):
        raise SpecError(
            f"You do not have permission to read the script {str(script)!r}. Change its mode (chmod u+r)."
        )
    if script.suffix == ".py":
        _check_syntax(script)
    else:
        _check_shebang(script)


def _check_shebang(script: Path) -> None:
    """Fail for a script of another interpreter, which Python would report as a syntax error."""
    with open(script, "rb") as file:
        first = file.readline(256)
    words = first[2:].decode(errors="replace").strip() if first.startswith(b"#!") else ""
    if script.suffix in _SHELL or (words and "python" not in words):
        why = f"begins with #!{words}" if words else f"ends in {script.suffix}"
        raise SpecError(
            f"The script {str(script)!r} {why}, but every rank runs it with Python. Give the Python script, "
            "and put shell lines into --setup."
        )


def _check_interpreter(python: Path) -> None:
    """Check an absolute path; a bare name is looked up where the job runs."""
    if python.is_absolute() and not (python.is_file() and os.access(python, os.X_OK)):
        raise SpecError(
            f"The interpreter {str(python)!r} does not exist or is not executable. Run hpctrain with another."
        )


def _check_run_folder(run: RunDir, *, is_array: bool) -> None:
    path = run.path
    if path.is_dir():
        _check_kind(run, is_array=is_array)
        # Checkpoints may have been imported before the first submission.
        names = set(os.listdir(path)) - {run.lock.name, run.checkpoints.name}
        missing = {run.spec.name, run.job_script.name} - names
        if names and missing:
            raise SpecError(
                f"The folder {str(path)!r} (--run-dir) is neither empty nor a run folder: it contains "
                f"{min(names)!r}, but no {min(missing)}. Choose another folder."
            )
    elif path.exists():
        raise SpecError(f"{str(path)!r} (--run-dir) is a file, not a folder. Choose a folder.")
    nearest = path
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise SpecError(
            f"Cannot create the run folder {str(path)!r} (--run-dir): {str(nearest)!r} is not a folder. "
            "Choose another folder."
        )
    room = os.statvfs(nearest)
    if not (room.f_blocks or room.f_files):
        raise SpecError(
            f"Cannot write the run folder {str(path)!r} (--run-dir): the file system of {str(nearest)!r} "
            "cannot store files. Choose another folder."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise SpecError(
            f"Cannot write the run folder {str(path)!r} (--run-dir): you have no write permission in "
            f"{str(nearest)!r}. Choose another folder."
        )


def _check_kind(run: RunDir, *, is_array: bool) -> None:
    """Fail if a single run would continue as an array or vice versa: their folders differ."""
    if run.array is not None and run.array.tasks() and run.array.spec.exists():
        task = run.path.name.rpartition("-")[2]
        raise SpecError(
            f"{str(run.path)!r} (--run-dir) is a task of a job array. To resume it, submit with "
            f"--run-dir {shlex.quote(str(run.array.path))} --array {task}."
        )
    if is_array and run.spec.exists() and not run.tasks():
        raise SpecError(
            f"The run in {str(run.path)!r} (--run-dir) is a single run and cannot continue as a job array "
            "(--array). Leave out --array, or choose another folder."
        )
    if not is_array and run.tasks():
        raise SpecError(
            f"{str(run.path)!r} (--run-dir) contains a job array. Give the tasks to resume with --array, or "
            "choose another folder."
        )
