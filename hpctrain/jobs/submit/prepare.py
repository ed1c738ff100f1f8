"""First half of a submission: resolve and check everything, write nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from hpctrain.errors import SpecError
from hpctrain.jobs.backends import choose_backend
from hpctrain.jobs.options.option import OptionSource, OptionValue
from hpctrain.jobs.options.resolved_options import PYTHON_SOURCE, ResolvedOptions, resolve_options
from hpctrain.jobs.options.spec_builder import RUNS_FOLDER, build_spec, node_shape
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.jobs.submit.preflight import CHECKS, Check, PreparedSubmission, run_preflight
from hpctrain.slurm.site_facts import Site
from hpctrain.spec.container import Container
from hpctrain.spec.job_spec import BackendName
from hpctrain.spec.program import ProgramKind

#: Types of a script's arguments; the script receives strings.
_ARGUMENTS = (str, int, float, os.PathLike)


def prepare_submission(
    script: str | os.PathLike[str],
    args: Sequence[str],
    options: SubmitOptions,
    *,
    source: OptionSource = PYTHON_SOURCE,
    assignments: Sequence[str] = (),
    previous: Sequence[OptionValue] | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
    code: Path | None = None,
    program: ProgramKind = "script",
    dry_run: bool = False,
    checks: Sequence[Check] = CHECKS,
) -> PreparedSubmission:
    """Resolve the options and check the job; nothing is written or submitted.

    Args:
        script: the Python script that every rank runs; the name of a module, or a command.
        args: its command-line arguments.
        options: options of this submission; option files supply the rest.
        source: origin of `options`.
        assignments: strings of the form KEY=VALUE, which override everything else.
        previous: options of the submission that this one repeats. See `resolve_options`.
        environ: the environment variables of the submission.
        cwd: the working directory of the script.
        python: the interpreter of supervisor and ranks.
        code: a folder of the working tree to copy, if the script is elsewhere.
        program: the kind of `script`.
        dry_run: the job will not be submitted, so an unresponsive Slurm is accepted if requested by name.
        checks: the checks to run.

    Raises:
        SpecError: the job cannot run as requested.
        SchedulerError: Slurm does not respond, but was requested by name or is set up on this machine.
    """
    if isinstance(args, str | bytes) or not all(isinstance(arg, _ARGUMENTS) for arg in args):
        raise SpecError(
            f"The arguments of the script are {args!r}, but must be a list of strings, numbers and "
            "paths, such as ['--steps', 100]."
        )
    settings = resolve_options(
        options, source=source, assignments=assignments, previous=previous, cwd=cwd, environ=environ
    )
    try:
        return _prepare(script, args, settings, environ, cwd, python, code, program, dry_run, checks)
    except SpecError as error:
        if places := settings.describe_sources(str(error)):
            raise SpecError(f"{error} ({places})") from error
        raise


def _prepare(
    script: str | os.PathLike[str],
    args: Sequence[str],
    settings: ResolvedOptions,
    environ: Mapping[str, str],
    cwd: Path,
    python: str,
    code: Path | None,
    program: ProgramKind,
    dry_run: bool,
    checks: Sequence[Check],
) -> PreparedSubmission:
    asked = settings.options
    backend, notes = choose_backend(asked.get("backend", "auto"), environ, dry_run=dry_run)
    notes += _resolve_runs(asked, backend.name, cwd, environ)
    if backend.name == "slurm":
        notes += [
            *_apply_srun_variables(asked, environ),
            *_choose_cpus(asked, partial(backend.site, settings.site), environ),
        ]
    container = _container(settings, backend.name, cwd, environ)
    spec = build_spec(
        script,
        args,
        asked,
        backend=backend.name,
        cwd=cwd,
        python=python,
        container=container,
        program=program,
    )
    if code is None and program != "script":
        code = cwd
    submission = PreparedSubmission(spec, settings, backend, environ, code, tuple(notes))
    run_preflight(submission, checks)
    return submission


def _container(
    settings: ResolvedOptions, backend: BackendName, cwd: Path, environ: Mapping[str, str]
) -> Container | None:
    if "container_image" not in settings.values:
        return None
    from hpctrain.jobs.submit.container_builder import build_container

    known = settings.site.habits.containers
    return build_container(settings.options, backend=backend, known=known, cwd=cwd, environ=environ)


def _resolve_runs(
    asked: SubmitOptions, backend: BackendName, cwd: Path, environ: Mapping[str, str]
) -> list[str]:
    """Replace the runs on which the job depends with their jobs; only Slurm supports dependencies."""
    directives = cast(dict[str, str], asked.get("sbatch", {}))
    if backend != "slurm" or "dependency" not in directives:
        return []
    from hpctrain.jobs.submit.dependency import resolve_dependency

    runs_dir = os.fspath(asked.get("runs_dir") or RUNS_FOLDER)
    resolved, notes = resolve_dependency(directives.pop("dependency"), cwd, environ, runs_dir)
    if resolved:
        directives["dependency"] = resolved
    return notes


def _apply_srun_variables(asked: SubmitOptions, environ: Mapping[str, str]) -> list[str]:
    """Turn the user's variables of srun into options; in a job, they would belong to that job."""
    if "SLURM_JOB_ID" in environ:
        return []
    notes = []
    for name, option in (("SLURM_CPU_BIND", "--cpu-bind"), ("SLURM_DISTRIBUTION", "--distribution")):
        srun_args = list(asked.get("srun_arg", ()))
        if (value := environ.get(name)) and not any(arg.startswith(option) for arg in srun_args):
            asked["srun_arg"] = [*srun_args, f"{option}={value}"]
            notes.append(f"The ranks start with srun {option}={value}, from the variable {name}.")
    return notes


def _choose_cpus(
    asked: SubmitOptions, get_site: Callable[[], Site | None], environ: Mapping[str, str]
) -> list[str]:
    """Choose the CPUs per rank of a job with GPUs, unless they were requested."""
    gpu_type, gpus, ntasks = node_shape(asked)
    if not gpus or "cpus_per_task" in asked or (site := get_site()) is None:
        return []
    from hpctrain.jobs.site.node_share import choose_cpus_per_task

    directives = asked.get("sbatch", {})
    partitions = directives.get("partition") or environ.get("SBATCH_PARTITION", "")
    cpus, note = choose_cpus_per_task(
        site,
        [name for name in partitions.split(",") if name],
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        ntasks_per_node=ntasks or gpus,
        whole_nodes=directives.get("exclusive") == "",
    )
    if cpus is not None:
        asked["cpus_per_task"] = cpus
    return [note]
