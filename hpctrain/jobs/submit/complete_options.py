"""Complete the options of a submission with facts about other runs, this shell and the Slurm site."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_table import SubmitOptions
from hpctrain.jobs.options.spec_builder import RUNS_FOLDER, node_shape
from hpctrain.jobspec.container import APPTAINER_PROGRAMS, ContainerRuntime, required_runtime
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.rundir import RunDir
from hpctrain.slurm.site_facts import NodeGroup, Partition, Site, SiteConventions, has_pyxis
from hpctrain.slurm.states import RunState
from hpctrain.text import suggest

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus

#: With fewer CPUs per rank, data workers compete with the training process.
_MIN_CPUS = 2
_ANY_END = tuple(state for state in RunState if state.ended)
_SUCCESS = (RunState.COMPLETED, RunState.STOPPED_EARLY)
#: Kinds of sbatch(1) and the final states of a run that satisfy each; None if no state does.
_FULFILLED_BY = {
    "after": _ANY_END,
    "afterany": _ANY_END,
    "afterburstbuffer": None,
    "aftercorr": _SUCCESS,
    "afternotok": (RunState.FAILED, RunState.CANCELLED),
    "afterok": _SUCCESS,
    "expand": None,
    "singleton": None,
}
_JOB = re.compile(r"\d+(_\d+|_\*)?(\+\d+)?", re.ASCII)
#: A run, and the optional delay in minutes that `after` accepts.
_RUN = re.compile(r"(.+?)(\+\d+)?", re.ASCII | re.DOTALL)


def complete_options(
    options: SubmitOptions,
    backend: BackendName,
    habits: SiteConventions,
    site: Site | None,
    cwd: Path,
    environ: Mapping[str, str],
    *,
    of_batch: bool = False,
) -> list[str]:
    """Set the options that the user left open, and return notes for the user."""
    notes: list[str] = []
    if backend == "slurm":
        notes += _resolve_runs(options, cwd, environ)
    if of_batch:
        return notes
    if backend == "slurm":
        notes += _apply_srun_variables(options, environ)
        notes += _choose_cpus(options, site) if site is not None else ()
    if "container_image" in options and options.get("container_runtime", "auto") == "auto":
        image = os.fspath(options["container_image"])
        options["container_runtime"] = _choose_runtime(image, backend, habits.containers, environ)
    return notes


def _resolve_runs(options: SubmitOptions, cwd: Path, environ: Mapping[str, str]) -> list[str]:
    """Replace the runs on which the job depends with their jobs."""
    directives = cast(dict[str, str], options.get("sbatch", {}))
    if "dependency" not in directives:
        return []
    runs_dir = os.fspath(options.get("runs_dir") or RUNS_FOLDER)
    resolved, notes = resolve_dependency(directives.pop("dependency"), cwd, environ, runs_dir)
    if resolved:
        directives["dependency"] = resolved
    return notes


def resolve_dependency(
    text: str, cwd: Path, environ: Mapping[str, str], runs_dir: str
) -> tuple[str, list[str]]:
    """Return the dependency with runs replaced by jobs, without those that have ended; and notes."""
    separator = "?" if "?" in text else ","
    conditions: list[str] = []
    notes: list[str] = []
    impossible: list[str] = []
    for condition in text.split(separator):
        kind, *names = condition.split(":")
        if kind not in _FULFILLED_BY:
            hint = suggest(kind, _FULFILLED_BY)
            raise SpecError(f"--dependency {text!r}: unknown kind of dependency {kind!r}. {hint}")
        states = _FULFILLED_BY[kind]
        jobs = []
        for name in names:
            option = f"--dependency {kind}:{name}"
            if _JOB.fullmatch(name):
                jobs.append(name)
                continue
            status, delay = _find_run(option, name, cwd, environ, runs_dir)
            if states is None or not status.state.ended:
                jobs.append(f"{status.job_id}{delay}")
            elif status.state not in states:
                impossible.append(
                    f"{option}: run {status.run_id} is already {status.state}, so the job would wait "
                    "forever. Resume that run first, or remove the dependency."
                )
            else:
                notes.append(f"{option} has no effect: run {status.run_id} is already {status.state}.")
                if separator == "?":
                    return "", notes
        if jobs or not names:
            conditions.append(":".join([kind, *jobs]))
    if impossible and not (separator == "?" and conditions):
        raise SpecError(impossible[0])
    return separator.join(conditions), notes


def _find_run(
    option: str, name: str, cwd: Path, environ: Mapping[str, str], runs_dir: str
) -> tuple[RunStatus, str]:
    match = _RUN.fullmatch(name)
    if match is None:
        raise SpecError(f"{option} specifies neither a job nor a run. Use KIND:JOB or KIND:RUN.")
    folder = os.path.join(cwd, match[1])
    run = folder if os.path.isfile(RunDir(Path(folder)).spec) else match[1]
    # Imported here because a submission without such a dependency needs no status.
    from hpctrain.jobs.runs.run import find_run

    status = find_run(run, cwd / runs_dir, environ).status()
    if status.job_id is None:
        raise SpecError(f"{option}: this run has never been submitted. Submit it first.")
    if status.backend != "slurm":
        raise SpecError(
            f"{option}: this run uses the local backend, so Slurm jobs cannot depend on it. Wait for the run "
            "with `hpctrain wait`, then submit."
        )
    return status, match[2] or ""


def _apply_srun_variables(options: SubmitOptions, environ: Mapping[str, str]) -> Iterator[str]:
    """Turn the user's variables of srun into options; in a job, they would belong to that job."""
    if "SLURM_JOB_ID" in environ:
        return
    for name, option in (("SLURM_CPU_BIND", "--cpu-bind"), ("SLURM_DISTRIBUTION", "--distribution")):
        srun_args = list(options.get("srun_arg", ()))
        if (value := environ.get(name)) and not any(arg.startswith(option) for arg in srun_args):
            options["srun_arg"] = [*srun_args, f"{option}={value}"]
            yield f"The ranks start with srun {option}={value}, from the variable {name}."


def _choose_cpus(options: SubmitOptions, site: Site) -> Iterator[str]:
    """Give each rank its GPUs' share of the CPUs of a node, unless the user requests CPUs."""
    gpu_type, gpus, ntasks = node_shape(options)
    if not gpus or "cpus_per_task" in options:
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


def _choose_runtime(
    image: str, backend: BackendName, runtimes: tuple[str, ...] | None, environ: Mapping[str, str]
) -> ContainerRuntime:
    """Choose a container runtime of the site; `runtimes` is None if its profile does not list any."""
    if (required := required_runtime(image)) is not None:
        return required
    if backend == "local":
        return "apptainer"
    if runtimes is None:
        programs = APPTAINER_PROGRAMS
        runtimes = tuple(name for name in programs if shutil.which(name, path=environ.get("PATH")))
        runtimes += ("pyxis",) if has_pyxis(environ) else ()
    if "pyxis" in runtimes:
        return "pyxis"
    if set(runtimes).intersection(APPTAINER_PROGRAMS):
        return "apptainer"
    raise SpecError(
        "No container runtime found on this machine: srun does not support --container-image (pyxis), and "
        "neither apptainer nor singularity is on PATH. If the nodes have a runtime, select it with "
        "container_runtime."
    )
