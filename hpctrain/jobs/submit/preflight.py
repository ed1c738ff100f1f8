"""Check a job on this machine, before anything is written."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.jobs.options.batch_options import OF_RANKS
from hpctrain.jobs.options.option import DEFAULT_SOURCE
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobs.options.resolved_options import PREVIOUS_SOURCE, ResolvedOptions
from hpctrain.jobspec.container import is_image_file
from hpctrain.jobspec.job_directives import directives_after_start
from hpctrain.jobspec.job_spec import DEFAULT_STOP_BEFORE_LIMIT_S, JobSpec
from hpctrain.jobspec.launcher import RANK_LAUNCHERS
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir
from hpctrain.slurm.environment import loaded_modules
from hpctrain.slurm.parsing import format_time_limit

_SHELL = (".sh", ".bash", ".zsh", ".csh", ".sbatch", ".slurm")
#: `conda env list` takes about a second, and longer on a busy file system.
_CONDA_LIMIT_S = 30.0
#: Seconds: ranks may take a minute to start; with less time they may not reach a first checkpoint.
_MIN_S = 300.0
#: Maximum number of seconds by which Slurm may send its signal early.
_EARLY_S = 60.0
#: Options that only the supervisor and its ranks use.
_OF_SUPERVISOR = (
    *("node_check", "max_failures", "restart_policy", "standby_workers", "hang_timeout", "cpu_binding"),
    *("independent_ranks", "resume_mode", "code_snapshot", "code_snapshot_limit", "stop_before_limit"),
)
_OF_SLURM = ("spare_nodes", "scale_up_after", "gpu_request_style", "resume_mode", "mpi", "srun_arg")


def check_job(
    spec: JobSpec, settings: ResolvedOptions, environ: Mapping[str, str], *, is_run: bool = True
) -> list[str]:
    """Check that the job can start from this machine, and return notes for the user."""
    notes = [*_check_options(spec, settings), *_short_time_notes(spec, settings)] if is_run else []
    notes += _check_program(spec, environ)
    _check_environment(spec, environ)
    if spec.program == "batch" and spec.backend == "slurm":
        notes += _check_output_folders(spec)
    if is_run:
        _check_staged_sources(spec)
        notes += _check_run_folder(spec, settings, environ)
    return notes


def _check_options(spec: JobSpec, settings: ResolvedOptions) -> list[str]:
    """Reject or report options, except from files, that have no effect on this job."""
    flags = {}
    for key, value in settings.values.items():
        if value.source.path is None and value.source != DEFAULT_SOURCE:
            name = key.partition(".")[0]
            flags[name] = all_options()[name].flag
    for name, flag in flags.items() if spec.program != "batch" else ():
        if spec.container is None and name.startswith("container_"):
            raise SpecError(
                f"{flag} requires a container, but --container-image is not given. Add --container-image, "
                f"or remove {flag}."
            )
        if spec.torchrun is None and name.startswith("rdzv_"):
            raise SpecError(
                f"{flag} requires torchrun, but srun starts the ranks (--launcher). Remove {flag}, or use "
                "--launcher torchrun."
            )
    reasons: dict[str, str] = {}
    if spec.program == "batch":
        reasons |= dict.fromkeys(OF_RANKS, "the batch script starts the ranks itself")
    if not spec.supervised:
        reasons |= dict.fromkeys(_OF_SUPERVISOR, "hpctrain does not run in the job (--template plain)")
    if spec.backend == "local":
        reasons |= dict.fromkeys(_OF_SLURM, "the run uses the local backend")
    if not spec.notify.targets:
        reasons |= dict.fromkeys(("notify_on", "notify_stall_after"), "--notify is not given")
    if spec.torchrun is not None:
        reasons |= dict.fromkeys(("standby_workers", "mpi"), "torchrun starts the ranks (--launcher)")
    elif spec.mpi != "none":
        reasons["standby_workers"] = "the ranks use MPI (--mpi)"
    if not spec.is_elastic:
        reasons["scale_up_after"] = f"the number of nodes is fixed (--nodes {spec.nodes})"
    return [f"{flag} has no effect: {reasons[name]}." for name, flag in flags.items() if name in reasons]


def _short_time_notes(spec: JobSpec, settings: ResolvedOptions) -> Iterator[str]:
    """Return a warning if the ranks receive the stop signal within five minutes after the job starts."""
    if spec.time_limit_s is None:
        return
    early_s = _EARLY_S if spec.backend == "slurm" else 0.0
    left_s = spec.time_limit_s - spec.stop_before_limit_s - early_s
    if left_s >= _MIN_S:
        return
    options = settings.options
    lead_s = spec.stop_before_limit_s if "stop_before_limit" in options else DEFAULT_STOP_BEFORE_LIMIT_S
    better = format_time_limit(60 * math.ceil((_MIN_S + lead_s + early_s) / 60))
    early_note = f" Slurm may send the stop signal up to {early_s:.0f} s early." if early_s else ""
    yield (
        f"Warning: the run may have only {max(0.0, left_s):g} s to start and train. The time limit is "
        f"{spec.time_limit_s:g} s (--time), and the ranks stop and save {spec.stop_before_limit_s} s before "
        f"it (--stop-before-limit).{early_note} The run fails after three attempts without a new checkpoint. "
        f"Use --time {better} or more."
    )


def _check_program(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[str]:
    name = os.path.basename(spec.script)
    if spec.program == "script":
        yield from _check_script(Path(spec.script), spec.checkpoints)
    elif spec.program != "batch" and spec.container is None and not _changes_search_path(spec):
        _check_module_or_command(spec, environ)
    if spec.program != "command" or name not in RANK_LAUNCHERS or spec.ntasks_per_node == 1:
        return
    yield (
        f"Warning: hpctrain runs {name} {spec.ntasks_per_node} times per node, once per rank, but {name} "
        "also starts ranks. Submit your training script itself, without the launcher."
    )


def _changes_search_path(spec: JobSpec) -> bool:
    """Return true if commands and modules may be found in the job that are not found here."""
    shell = spec.shell
    return bool(shell.python or shell.modules or shell.setup or {"PATH", "PYTHONPATH"} & spec.env.keys())


def _check_module_or_command(spec: JobSpec, environ: Mapping[str, str]) -> None:
    if spec.program == "command":
        file = os.path.join(spec.workdir, spec.script)
        if shutil.which(spec.script, path=environ.get("PATH")) is None and not os.path.isfile(file):
            raise SpecError(
                f"Command {spec.script!r} not found: it is neither on PATH nor a file in {spec.workdir!r}. "
                "Check its name, or pass its path."
            )
    elif spec.python == sys.executable and not _has_module(spec.script, [spec.workdir, *sys.path]):
        raise SpecError(
            f"Module {spec.script!r} (-m) not found: it is neither in {spec.workdir!r} nor in the "
            f"environment of {spec.python!r}. Submit from the package's parent folder, or install the "
            "package."
        )


def _has_module(name: str, folders: Sequence[str]) -> bool:
    """Return true if a module can be found. Nothing is imported."""
    search, packages = list(folders), name.split(".")
    for length in range(1, len(packages) + 1):
        module = PathFinder.find_spec(".".join(packages[:length]), search)
        if module is None:
            return False
        search = list(module.submodule_search_locations or [])
    return True


def _check_script(script: Path, checkpoints: str | None) -> Iterator[str]:
    # The shell replaces a pattern without quotes by files, of which --checkpoints takes only the first.
    hint = ""
    if checkpoints is not None and os.path.exists(checkpoints):
        hint = " If it matches a pattern of --checkpoints, quote this pattern: --checkpoints 'out/*.pt'."
    try:
        if script.exists() and not script.is_file():
            raise SpecError(
                f"The script {str(script)!r} is not a regular file. Pass the path of a Python file.{hint}"
            )
        with open(script, "rb") as file:
            block = file.read(65_536)
        if b"\0" in block:
            raise SpecError(
                f"The script {str(script)!r} is not a text file. Pass a Python file or batch script.{hint}"
            )
        has_directives = re.search(rb"^#SBATCH", block, re.MULTILINE) is not None
        if script.suffix != ".py":
            _check_shebang(script, block.partition(b"\n")[0], has_directives=has_directives)
        if has_directives:
            yield (
                f"The #SBATCH lines of {script.name} have no effect, because it is a Python script. Give "
                "their options to hpctrain submit."
            )
        if script.suffix == ".py":
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (FileNotFoundError, NotADirectoryError):
        hint = "Check its path."
        if shutil.which(script.name):
            hint = f"{script.name!r} is a command. Put -- before it: hpctrain submit … -- {script.name} …"
        raise SpecError(f"Script {str(script)!r} not found. {hint}") from None
    except OSError as error:
        raise SpecError(f"Cannot read the script {str(script)!r}: {error.strerror}.") from None
    except SyntaxError as error:
        raise SpecError(
            f"The script {str(script)!r} has a syntax error on line {error.lineno}: {error.msg}."
        ) from None
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"Cannot parse the script {str(script)!r} as Python: {error}.") from None


def _check_shebang(script: Path, line: bytes, *, has_directives: bool) -> None:
    """Reject a script for another interpreter, which Python would report as a syntax error."""
    if has_directives and not line.startswith(b"#!"):
        raise SpecError(
            f"The script {str(script)!r} has #SBATCH lines, but no #! line, which sbatch requires, too. "
            "Begin the script with #!/bin/bash."
        )
    interpreter = line[2:].decode(errors="replace").strip() if line.startswith(b"#!") else ""
    if "python" not in interpreter and (interpreter or script.suffix in _SHELL):
        reason = f"begins with #!{interpreter}" if interpreter else f"ends in {script.suffix}"
        raise SpecError(
            f"The script {str(script)!r} {reason}, but every rank runs it with Python. Pass the Python "
            "script, and add shell lines with --setup."
        )


def _check_environment(spec: JobSpec, environ: Mapping[str, str]) -> None:
    python = Path(spec.python)
    is_given = spec.shell.python is None and python.is_absolute()
    if is_given and not (python.is_file() and os.access(python, os.X_OK)):
        raise SpecError(
            f"The interpreter {str(python)!r} does not exist or is not executable. Run hpctrain with "
            "another interpreter."
        )
    shell = spec.shell
    # Modules and shell lines may provide conda in the job only.
    if shell.conda and shell.environment is None and not (shell.modules or shell.setup):
        _check_conda(shell.conda, environ)
    if shell.environment is not None and not (shell.environment / "bin" / "python").exists():
        option = "--venv" if shell.venv else "--conda"
        raise SpecError(
            f"{str(shell.environment)!r} ({option}) is not a Python environment: it has no bin/python. "
            "Check its path."
        )
    image = spec.container.image if spec.container else ""
    if is_image_file(image) and not os.path.exists(image):
        raise SpecError(f"Image {image!r} (--container-image) not found. Check its path.")


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


def _check_output_folders(spec: JobSpec) -> Iterator[str]:
    """Check the folders of --output and --error, without which Slurm ends a job before it starts."""
    for option in ("output", "error"):
        path = spec.directives.get(option, "")
        # Slurm replaces patterns, such as %j, and creates no folder.
        folder = os.path.dirname(path.replace("%%", "\0").partition("%")[0]).replace("\0", "%")
        if not path or (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            continue
        state = "is not writable" if os.path.isdir(folder) else "does not exist"
        problem = (
            f"The folder {folder!r} of --{option} {state}. Without it, Slurm ends the job before the script "
            "starts, and without any output."
        )
        if Path(folder).is_relative_to(spec.workdir):
            create = f"Create it: mkdir -p {shlex.quote(folder)}"
            raise SpecError(f"{problem} {'Change its permissions.' if os.path.isdir(folder) else create}")
        yield f"Warning: on this machine, {problem[0].lower()}{problem[1:]}"


def _check_staged_sources(spec: JobSpec) -> None:
    for source in spec.stage.values():
        if not os.path.exists(source):
            raise SpecError(f"{source!r} (--stage) not found. Check its path.")
        if not (os.path.isfile(source) or os.path.isdir(source)) or not os.access(source, os.R_OK):
            raise SpecError(f"{source!r} (--stage) is not a readable file or folder. Check its permissions.")


def _check_run_folder(spec: JobSpec, settings: ResolvedOptions, environ: Mapping[str, str]) -> Iterable[str]:
    """Check that the run folder is writable, and that it is new or belongs to the same kind of run."""
    run = RunDir(Path(spec.run_dir))
    try:
        _check_writable(run, is_array=spec.array is not None)
        return list(_describe_changes(run, spec, settings, environ)) if run.spec.exists() else []
    except OSError as error:
        raise SpecError(
            f"Cannot access the run folder {spec.run_dir!r} (--run-dir): {error.strerror}. "
            "Choose another folder."
        ) from error


def _describe_changes(
    run: RunDir, spec: JobSpec, settings: ResolvedOptions, environ: Mapping[str, str]
) -> Iterator[str]:
    """Describe how the submission differs from the run in its folder, which it continues."""
    try:
        before = load_spec(run.spec)
    except SpecError:
        return
    submissions = [event for event in run.read_events() if event.is_new_submission]
    modules = loaded_modules(environ)
    earlier_modules = (submissions[-1].modules if submissions else None) or []
    if earlier_modules != modules and not set(earlier_modules) <= set(spec.shell.modules):
        yield (
            f"This shell has loaded the modules {' '.join(modules) or '(none)'}, but the run was submitted "
            f"with {' '.join(earlier_modules)}. The job inherits those of this shell. To load others in "
            "every job of the run, use --module NAME."
        )
    is_repeated = any(value.source == PREVIOUS_SOURCE for value in settings.values.values())
    missing = {} if is_repeated else directives_after_start(before.directives)
    if dropped := [f"--{key}={value}" for key, value in missing.items() if key not in spec.directives]:
        yield (
            f"The run was submitted with {' '.join(dropped)}, and is continued without. To repeat all "
            f"options, use `hpctrain resume {shlex.quote(str(run.path))}`."
        )
    if before.code is not None and (names := _files_written_into(Path(before.code.copy))):
        others = f" and {len(names) - 1} more" if names[1:] else ""
        yield (
            f"The run wrote files into its code snapshot, {before.code.copy!r}: {names[0]!r}{others}. This "
            "submission uses a new snapshot without these files. Copy the files that the script needs, and "
            "change the script to write to the working directory or $HPCTRAIN_RUN_DIR."
        )
    programs = {
        "script": (before.script, spec.script),
        "arguments": tuple(map(shlex.join, (before.args, spec.args))),
    }
    changed = [
        f"{name} {current or 'none'!r} instead of {earlier or 'none'!r}"
        for name, (earlier, current) in programs.items()
        if earlier != current
    ]
    if changed:
        yield (
            f"The folder {str(run.path)!r} (--run-dir) contains a run, which this submission continues with "
            f"{' and '.join(changed)}. To start a new run instead, choose another folder."
        )


def _files_written_into(copy: Path) -> list[str]:
    """Return the files in a code snapshot that are newer than its record."""
    try:
        copied_at = os.stat(f"{copy}.json").st_mtime
    except OSError:
        return []
    return [
        str(path.relative_to(copy))
        for path in sorted(copy.rglob("*"))
        if path.suffix != ".pyc" and path.is_file() and path.lstat().st_mtime > copied_at
    ]


def _check_writable(run: RunDir, *, is_array: bool) -> None:
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
    nearest = next(folder for folder in (path, *path.parents) if folder.exists())
    stat = os.statvfs(nearest)
    problems = {
        f"{str(nearest)!r} is not a folder": not nearest.is_dir(),
        f"the file system of {str(nearest)!r} cannot store files": not (stat.f_blocks or stat.f_files),
        f"you have no write permission in {str(nearest)!r}": not os.access(nearest, os.W_OK | os.X_OK),
    }
    if problem := next((text for text, applies in problems.items() if applies), None):
        raise SpecError(
            f"Cannot write to the run folder {str(path)!r} (--run-dir): {problem}. Choose another folder."
        )


def _check_kind(run: RunDir, *, is_array: bool) -> None:
    """Reject a single run that would continue as an array, or vice versa: their folders differ."""
    if run.array is not None and run.array.tasks() and run.array.spec.exists():
        task = run.path.name.rpartition("-")[2]
        raise SpecError(
            f"{str(run.path)!r} (--run-dir) is a task of a job array. To resume it, submit with "
            f"--run-dir {shlex.quote(str(run.array.path))} --array {task}."
        )
    if is_array and run.spec.exists() and not run.tasks():
        raise SpecError(
            f"The run in {str(run.path)!r} (--run-dir) is a single run and cannot continue as a job array "
            "(--array). Remove --array, or choose another folder."
        )
    if not is_array and run.tasks():
        raise SpecError(
            f"{str(run.path)!r} (--run-dir) contains a job array. Use --array to select the tasks to resume, "
            "or choose another folder."
        )
