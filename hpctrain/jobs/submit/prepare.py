"""Resolve and check everything about a submission; write nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from hpctrain.errors import SpecError
from hpctrain.jobs.backends import choose_backend
from hpctrain.jobs.options.batch_options import BatchScript, build_batch_spec
from hpctrain.jobs.options.option import OptionSource, OptionValue
from hpctrain.jobs.options.resolved_options import PYTHON_SOURCE, resolve_options
from hpctrain.jobs.options.spec_builder import RUNS_FOLDER, build_spec, node_shape
from hpctrain.jobs.options.table import SubmitOptions
from hpctrain.jobs.submit.preflight import CHECKS, Check, PreparedSubmission
from hpctrain.jobspec.launcher import ProgramKind
from hpctrain.slurm.site_facts import NodeGroup, Partition, Site

#: Types of a script's arguments; the script receives strings.
_ARGUMENTS = (str, int, float, os.PathLike)
#: With fewer CPUs per rank, data workers compete with the training process.
_MIN_CPUS = 2


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
    """
    if isinstance(args, str | bytes) or not all(isinstance(arg, _ARGUMENTS) for arg in args):
        raise SpecError(
            f"The arguments of the script are {args!r}, but must be a list of strings, numbers and "
            "paths, such as ['--steps', 100]."
        )
    batch = BatchScript.read(cwd / script) if program == "script" else None
    settings = resolve_options(
        options,
        source=source,
        assignments=assignments,
        previous=previous,
        header=None if batch is None else batch.options,
        cwd=cwd,
        environ=environ,
    )
    try:
        backend, notes = choose_backend(settings.options.get("backend", "auto"), environ, dry_run=dry_run)
        if backend.name == "local":
            settings = settings.without_variables()
        chosen = settings.options
        if backend.name == "slurm":
            notes += [
                *_resolve_runs(chosen, cwd, environ),
            ]
            if batch is None:
                notes += _apply_srun_variables(chosen, environ)
                notes += _choose_cpus(chosen, partial(backend.site, settings.habits))
        container = None
        if "container_image" in chosen and batch is None:
            from hpctrain.jobs.submit.container_builder import build_container

            runtimes = settings.habits.containers
            container = build_container(
                chosen, backend=backend.name, runtimes=runtimes, cwd=cwd, environ=environ
            )
        shape: dict[str, Any] = {"backend": backend.name, "cwd": cwd, "python": python}
        origins: Mapping[str, str] = {}
        if batch is None:
            spec = build_spec(script, args, chosen, container=container, program=program, **shape)
        else:
            spec, origins = build_batch_spec(script, args, chosen, settings.values, **shape)
            notes += batch.notes
        if code is None and program != "script":
            code = cwd
        submission = PreparedSubmission(
            spec, settings, backend, environ, code, tuple(notes), batch=batch, origins=origins
        )
        for check in checks:
            submission.notes += tuple(check(submission) or ())
        return submission
    except SpecError as error:
        if places := settings.describe_sources(str(error)):
            raise SpecError(f"{error} ({places})") from error
        raise


def _resolve_runs(options: SubmitOptions, cwd: Path, environ: Mapping[str, str]) -> list[str]:
    """Replace the runs on which the job depends with their jobs."""
    directives = cast(dict[str, str], options.get("sbatch", {}))
    if "dependency" not in directives:
        return []
    from hpctrain.jobs.submit.dependency import resolve_dependency

    runs_dir = os.fspath(options.get("runs_dir") or RUNS_FOLDER)
    resolved, notes = resolve_dependency(directives.pop("dependency"), cwd, environ, runs_dir)
    if resolved:
        directives["dependency"] = resolved
    return notes


def _apply_srun_variables(options: SubmitOptions, environ: Mapping[str, str]) -> list[str]:
    """Turn the user's variables of srun into options; in a job, they would belong to that job."""
    if "SLURM_JOB_ID" in environ:
        return []
    notes = []
    for name, option in (("SLURM_CPU_BIND", "--cpu-bind"), ("SLURM_DISTRIBUTION", "--distribution")):
        srun_args = list(options.get("srun_arg", ()))
        if (value := environ.get(name)) and not any(arg.startswith(option) for arg in srun_args):
            options["srun_arg"] = [*srun_args, f"{option}={value}"]
            notes.append(f"The ranks start with srun {option}={value}, from the variable {name}.")
    return notes


def _choose_cpus(options: SubmitOptions, get_site: Callable[[], Site | None]) -> Iterator[str]:
    """Give each rank its share of the CPUs of the nodes, unless the user requests CPUs.

    A job that uses half of the GPUs of a node gets half of its CPUs, so that other jobs can use the rest.
    """
    gpu_type, gpus, ntasks = node_shape(options)
    if not gpus or "cpus_per_task" in options or (site := get_site()) is None:
        return
    directives = options.get("sbatch", {})
    names = directives.get("partition", "").split(",")
    partitions = [site.partition(name) for name in names if name] or [site.default_partition]
    whole_nodes = directives.get("exclusive") in ("", "exclusive")
    shares = [
        (_share(group, partition, gpus, whole_nodes) // (ntasks or gpus), group, partition)
        for partition in partitions
        if partition is not None
        for group in partition.groups
        if gpus <= (group.gpus.get(gpu_type, 0) if gpu_type else group.num_gpus)
    ]
    if not shares:
        yield (
            "The CPUs of the nodes are unknown, so each rank gets Slurm's default, usually 1 CPU. Choose "
            "another number with --cpus-per-task."
        )
        return
    share, group, partition = min(shares, key=lambda entry: entry[0])
    cpus = options["cpus_per_task"] = max(1, share)
    if cpus < _MIN_CPUS:
        yield (
            f"Warning: each rank gets only {cpus} of the {group.cpus} CPUs of a node in partition "
            f"{partition.name} (--cpus-per-task), so data workers compete with training."
        )
        return
    yield (
        f"Each rank gets {cpus} of the {group.cpus} CPUs of a node (--cpus-per-task {cpus}): the share of "
        f"its GPUs in partition {partition.name}, whose nodes have {group.num_gpus} GPUs."
    )


def _share(group: NodeGroup, partition: Partition, gpus_per_node: int, whole_nodes: bool) -> int:
    """Return the CPUs of a node that a job with this many of its GPUs may use."""
    cpus = group.cpus
    if not (whole_nodes or partition.whole_nodes):
        cpus = cpus * gpus_per_node // group.num_gpus
    return min(cpus, partition.max_cpus_per_node or cpus)
