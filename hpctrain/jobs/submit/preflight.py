"""Checks of a submission, in order, before anything is written."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError
from hpctrain.jobs.backends.base import Backend, PreflightResult
from hpctrain.jobs.options.option import DEFAULT_SOURCE
from hpctrain.jobs.options.resolved_options import PREVIOUS_SOURCE, ResolvedOptions
from hpctrain.jobs.options.table import all_options
from hpctrain.jobs.submit.render import render
from hpctrain.jobspec.directives import directives_after_start
from hpctrain.jobspec.job_spec import DEFAULT_STOP_BEFORE_LIMIT_S, JobSpec
from hpctrain.jobspec.launcher import RANK_LAUNCHERS
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir
from hpctrain.slurm.duration import format_time_limit

if TYPE_CHECKING:
    from hpctrain.jobs.submit.code_snapshot import CodeSnapshot

_SHELL = (".sh", ".bash", ".zsh", ".csh", ".sbatch", ".slurm")
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
_WITHOUT_SUPERVISOR = (
    "Without hpctrain in the job (--template plain), a crash or the time limit ends the run, and hangs are "
    "not detected. Slurm requeues the job only after a preemption or a node failure, and the script must "
    "load its own checkpoint."
)


@dataclass
class PreparedSubmission:
    """A job, and the findings of its checks. `JobSpec` has checked its own values (`spec/validation.py`)."""

    spec: JobSpec
    settings: ResolvedOptions = field(repr=False)
    backend: Backend
    #: Environment variables of the submission. Some may be secret.
    environ: Mapping[str, str] = field(repr=False)
    code: Path | None
    """A folder of the working tree to copy, if the script is elsewhere."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""
    script: str = ""
    """The batch script, exactly as it will be submitted; set by `check_template`."""
    snapshot: CodeSnapshot | None = None
    """Code to copy into the run folder, if any; set by `check_code`."""
    preflight: PreflightResult = field(default_factory=PreflightResult)
    """Findings of the backend; set by `check_backend`."""

    @property
    def forecast(self) -> tuple[str, ...]:
        """Return the expected start and cost; waits for the scheduler's answer."""
        return self.preflight.get_forecast()


#: A check returns notes for the user, if any, and raises SpecError for a job that cannot run.
Check = Callable[[PreparedSubmission], Iterable[str] | None]


def check_options(job: PreparedSubmission) -> list[str]:
    """Reject or report options, except from files, that have no effect on this job."""
    spec, flags = job.spec, {}
    for key, value in job.settings.values.items():
        if value.source.path is None and value.source != DEFAULT_SOURCE:
            name = key.partition(".")[0]
            flags[name] = all_options()[name].flag
    for name, flag in flags.items():
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


def check_time_left(job: PreparedSubmission) -> Iterator[str]:
    """Return a warning if the ranks receive the stop signal within five minutes after the job starts."""
    spec = job.spec
    if spec.time_limit_s is None:
        return
    early_s = _EARLY_S if spec.backend == "slurm" else 0.0
    left_s = spec.time_limit_s - spec.stop_before_limit_s - early_s
    if left_s >= _MIN_S:
        return
    options = job.settings.options
    lead_s = spec.stop_before_limit_s if "stop_before_limit" in options else DEFAULT_STOP_BEFORE_LIMIT_S
    better = format_time_limit(60 * math.ceil((_MIN_S + lead_s + early_s) / 60))
    early_note = f" Slurm may send the stop signal up to {early_s:.0f} s early." if early_s else ""
    yield (
        f"Warning: the run may have only {max(0.0, left_s):g} s to start and train. The time limit is "
        f"{spec.time_limit_s:g} s (--time), and the ranks stop and save {spec.stop_before_limit_s} s before "
        f"it (--stop-before-limit).{early_note} The run fails after three attempts without a new checkpoint. "
        f"Use --time {better} or more."
    )


def check_program(job: PreparedSubmission) -> Iterator[str]:
    """Check that the script is a readable Python file, or that the module or command exists."""
    spec, name = job.spec, os.path.basename(job.spec.script)
    if spec.program == "script":
        _check_script(Path(spec.script))
    elif spec.container is None and not _changes_search_path(spec):
        _check_module_or_command(spec, job.environ)
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


def _check_script(script: Path) -> None:
    try:
        if script.exists() and not script.is_file():
            raise SpecError(
                f"The script {str(script)!r} is not a regular file. Pass the path of a Python file."
            )
        if script.suffix != ".py":
            _check_shebang(script)
        else:
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
    except ValueError as error:
        raise SpecError(f"Cannot parse the script {str(script)!r} as Python: {error}.") from None


def _check_shebang(script: Path) -> None:
    """Reject a script for another interpreter, which Python would report as a syntax error."""
    with open(script, "rb") as file:
        line = file.readline(256)
    interpreter = line[2:].decode(errors="replace").strip() if line.startswith(b"#!") else ""
    if script.suffix in _SHELL or (interpreter and "python" not in interpreter):
        reason = f"begins with #!{interpreter}" if interpreter else f"ends in {script.suffix}"
        raise SpecError(
            f"The script {str(script)!r} {reason}, but every rank runs it with Python. Pass the Python "
            "script, and add shell lines with --setup."
        )


def check_environment(job: PreparedSubmission) -> None:
    """Check interpreter, conda or virtual environment, and container."""
    spec, python = job.spec, Path(job.spec.python)
    is_given = spec.shell.python is None and python.is_absolute()
    if is_given and not (python.is_file() and os.access(python, os.X_OK)):
        raise SpecError(
            f"The interpreter {str(python)!r} does not exist or is not executable. Run hpctrain with "
            "another interpreter."
        )
    spec.shell.check_files(job.environ)
    if spec.container is not None:
        spec.container.check_files()


def check_staged_sources(job: PreparedSubmission) -> None:
    """Check that the sources of `--stage` are readable files or folders."""
    for source in job.spec.stage.values():
        if not os.path.exists(source):
            raise SpecError(f"{source!r} (--stage) not found. Check its path.")
        if not (os.path.isfile(source) or os.path.isdir(source)) or not os.access(source, os.R_OK):
            raise SpecError(f"{source!r} (--stage) is not a readable file or folder. Check its permissions.")


def check_run_folder(job: PreparedSubmission) -> Iterable[str]:
    """Check that the run folder is writable, and that it is new or belongs to the same kind of run."""
    run = RunDir(Path(job.spec.run_dir))
    try:
        _check_run_folder(run, is_array=job.spec.array is not None)
        return list(_describe_changes(run, job)) if run.spec.exists() else []
    except OSError as error:
        raise SpecError(
            f"Cannot access the run folder {job.spec.run_dir!r} (--run-dir): {error.strerror}. "
            "Choose another folder."
        ) from error


def loaded_modules(environ: Mapping[str, str]) -> list[str]:
    """Return the environment modules of this shell, as Environment Modules and Lmod list them."""
    return [name for name in environ.get("LOADEDMODULES", "").split(":") if name]


def _describe_changes(run: RunDir, job: PreparedSubmission) -> Iterator[str]:
    """Describe how the submission differs from the run in its folder, which it continues."""
    spec = job.spec
    try:
        before = load_spec(run.spec)
    except SpecError:
        return
    submissions = [event for event in run.read_events() if event.is_new_submission]
    modules = loaded_modules(job.environ)
    earlier_modules = (submissions[-1].modules if submissions else None) or []
    if earlier_modules != modules and not set(earlier_modules) <= set(spec.shell.modules):
        yield (
            f"This shell has loaded the modules {' '.join(modules) or '(none)'}, but the run was submitted "
            f"with {' '.join(earlier_modules)}. The job inherits those of this shell. To load others in "
            "every job of the run, use --module NAME."
        )
    is_repeated = any(value.source == PREVIOUS_SOURCE for value in job.settings.values.values())
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
    old, new = ((job.script, shlex.join(job.args)) for job in (before, spec))
    changed = [
        f"{name} {current or 'none'!r} instead of {then or 'none'!r}"
        for name, then, current in zip(("script", "arguments"), old, new, strict=True)
        if then != current
    ]
    if not changed:
        return
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


def check_code(job: PreparedSubmission) -> Iterable[str]:
    """Choose the code to copy; check its size, and that git can list the files."""
    options = job.settings.options
    if not options.get("code_snapshot", True) or not job.spec.supervised:
        return ()
    # Imported only if needed, because this import is slow.
    from hpctrain.jobs.submit.code_snapshot import plan_snapshot

    script, limit_mb = job.spec.script, options["code_snapshot_limit"]
    job.snapshot, notes = plan_snapshot(
        script, limit_mb, job.environ, folder=job.code, starts_now=job.backend.name == "local"
    )
    return notes


def check_template(job: PreparedSubmission) -> list[str]:
    """Render the batch script; a custom template must still start the supervisor."""
    site = job.backend.site(job.settings.habits)
    if site is not None and site.slurm is not None and site.habits.requeue and site.slurm.expedites_requeues:
        job.spec = replace(job.spec, expedite_requeue=True)
    job.script = render(job.spec)
    return [] if job.spec.supervised else [_WITHOUT_SUPERVISOR]


def check_backend(job: PreparedSubmission) -> Iterable[str]:
    """Check the job against this machine or its Slurm site."""
    job.preflight = job.backend.check(job.spec, job.script, job.settings.habits)
    return job.preflight.notes


#: All checks of a run, in order.
CHECKS: tuple[Check, ...] = (
    check_options,
    check_time_left,
    check_program,
    check_environment,
    check_staged_sources,
    check_run_folder,
    check_code,
    check_template,
    check_backend,
)
