"""Check a job against the facts about its site, explain refusals of `sbatch`, and forecast start and cost.

`check_request` finds what `sbatch --test-only` accepts nevertheless: unless EnforcePartLimits is set, a job
that exceeds the limits of its partition is queued, and pends forever (seen with Slurm 22.05 and 26.05).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends.backend import PreflightResult
from hpctrain.jobs.backends.cost_estimate import estimate_cost
from hpctrain.jobs.backends.job_request import JobRequest
from hpctrain.jobs.backends.mounts import path_notes
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm import parsing
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_requests import JobTest, describe_start
from hpctrain.slurm.parsing import format_time_limit
from hpctrain.slurm.pending_reasons import REMEDIES, suggest_remedy
from hpctrain.slurm.sbatch_options import OPTIONS
from hpctrain.slurm.site_facts import NodeGroup, Partition, RunQuery, Site
from hpctrain.text import join_or, pluralize, suggest

_QOS_FLAGS = ("sacctmgr", "--noheader", "--parsable2", "--readonly", "show", "qos", "format=Name,Flags")
_RESUBMIT_HINT = "Submit the run again with the same --run-dir to continue."
_SUCCESSOR_NOTE = "continues in a successor job, which starts after the previous job has ended"


def explain_refusal(refusal: str, request: JobRequest, site: Site) -> str:
    """Return Slurm's message, and sentences on the remedy."""
    remedy = next((remedy for text, remedy in REMEDIES.items() if text in refusal), None)
    if remedy is None:
        return f"{refusal}. {suggest_remedy(refusal)}"
    candidates = _candidate_partitions(request, site)
    features = {
        feature for partition in candidates for group in partition.groups for feature in group.features
    }
    names = [partition.name for partition in site.partitions if not partition.hidden]
    unknown = next((name for name in request.partitions if site.partition(name) is None), "")
    facts = {
        "request": request.describe(),
        "offers": " ".join(
            f"Partition {partition.name} has {partition.describe_nodes()}; {partition.describe_limits()}."
            for partition in candidates
        ),
        "partition_hint": f"Unknown partition {unknown!r} ({request.origin('partition')}). "
        f"{suggest(unknown, names)}",
        "features": ", ".join(sorted(features)) or "there are none, so remove the option",
        "option_hint": _option_hint(refusal),
        "last_task": site.slurm.max_array_size - 1 if site.slurm else "lower",
    }
    return f"{refusal}. {' '.join(remedy.format(**facts).split())}"


def _option_hint(refusal: str) -> str:
    """Return a sentence on the option that sbatch does not recognize, if any."""
    match = re.search(r"unrecognized option '--([\w-]+)", refusal)
    if match is None:
        return suggest_remedy(refusal)
    if match[1] in OPTIONS:
        return "This version of sbatch does not have the option. Remove it."
    flags = (f"--{name}" for name, option in OPTIONS.items() if option.use != "salloc")
    return suggest(f"--{match[1]}", flags, otherwise="Correct or remove the option.")


class ExceededLimit(NamedTuple):
    message: str
    qos_flag: str | None = None
    """Flag of a QOS that lifts the limit (sacctmgr(1), FLAGS of a QOS)."""


def check_request(request: JobRequest, site: Site, ask: RunQuery) -> tuple[list[str], list[Partition]]:
    """Return notes for the user, and the partitions in which the job may run."""
    if violations := list(_violated_conventions(request, site)):
        raise SpecError("\n".join(violations))
    candidates = _candidate_partitions(request, site)
    if not candidates:
        return [], []
    exceeded = [list(_exceeded_limits(request, partition, site)) for partition in candidates]
    lifting = _lifting_qos(site, ask) if any(exceeded) else {}
    fatal = [[limit.message for limit in limits if limit.qos_flag not in lifting] for limits in exceeded]
    suitable = [partition for partition, messages in zip(candidates, fatal, strict=True) if not messages]
    if not suitable:
        raise SpecError("\n".join(dict.fromkeys(message for messages in fatal for message in messages)))
    notes = [
        f"{limit.message} This limit does not apply if the job's QOS is {join_or(lifting[limit.qos_flag])} "
        f"(QOS flag {limit.qos_flag})."
        for limit in (exceeded[0] if len(candidates) == 1 else ())
        if limit.qos_flag is not None
    ]
    notes += _default_notes(request, suitable[0], site)
    return [*notes, *_requeue_notes(request, suitable[0], site)], suitable


def _candidate_partitions(request: JobRequest, site: Site) -> list[Partition]:
    """Return the partitions in which the job may run; empty if unknown."""
    if request.partitions:
        return [partition for partition in site.partitions if partition.name in request.partitions]
    if site.default_partition is not None and not (site.slurm and site.slurm.chooses_partition):
        return [site.default_partition]
    return [partition for partition in site.partitions if not partition.hidden]


def _violated_conventions(request: JobRequest, site: Site) -> Iterator[str]:
    """Yield violations of site rules, which only the site profile contains."""
    option, habits = request.memory_option, site.habits
    if option is not None and habits.memory_option == "refused":
        yield (
            f"Memory was requested ({request.origin(option)}), but this site rejects jobs with a memory "
            "request (memory_option: refused in the site profile). Remove the option. The site chooses the "
            "memory of a job."
        )
    if habits.needs_memory and option is None:
        yield "This site rejects jobs without a memory request (needs_memory in the site profile). Use --mem."
    if habits.needs_time and "time" not in request.directives:
        yield "This site rejects jobs without a time limit (needs_time in the site profile). Use --time."


def _exceeded_limits(request: JobRequest, partition: Partition, site: Site) -> Iterator[ExceededLimit]:
    """Yield the limits of the partition that the job exceeds, although `sbatch --test-only` may accept it."""
    name, limit_s, time_s, spec = partition.name, partition.max_time_s, request.time_limit_s, request.spec
    lead_s, default_s = spec.stop_before_limit_s, partition.time_without_option_s
    if "time" not in request.directives:
        if default_s is not None and default_s <= lead_s:
            setting = "DefaultTime" if partition.default_time_s is not None else "MaxTime"
            yield ExceededLimit(
                f"Partition {name} ends a job without --time after {format_time_limit(default_s)} "
                f"({setting}), but the ranks stop and save {lead_s} s before the limit "
                "(--stop-before-limit), so there is no time to train. Set --time to a longer limit, or "
                "reduce --stop-before-limit."
            )
    elif limit_s is not None and (time_s is None or time_s > limit_s):
        time = "An unlimited time" if time_s is None else f"A time limit of {format_time_limit(time_s)}"
        yield ExceededLimit(
            f"{time} was requested ({request.origin('time')}), but partition {name} allows at most "
            f"{format_time_limit(limit_s)} (MaxTime). Use --time {format_time_limit(limit_s)} or less: "
            "the run saves before the limit and continues in the next attempt.",
            "PartitionTimeLimit",
        )
    # Without a number of nodes, or with a range, a batch script gets as many as the partition requires.
    is_fixed = spec.program != "batch" or request.value("nodes").isdecimal()
    if is_fixed and spec.most_granted < partition.min_nodes:
        yield ExceededLimit(
            f"The job requests {pluralize(spec.most_granted, 'node')} (--nodes), but partition {name} "
            f"requires at least {partition.min_nodes} per job (MinNodes). Request more nodes.",
            "PartitionMinNodes",
        )
    # For a range of nodes, Slurm allocates what the partition allows.
    minimum, cpus, mib = spec.least_granted, request.cpus_per_node, request.memory_per_node_mib
    max_mib = partition.max_mem_per_node_mib
    if max_mib is None and partition.max_mem_per_cpu_mib is None and site.slurm is not None:
        max_mib = site.slurm.max_mem_per_node_mib
    memory = request.origin(request.memory_option or "mem")
    maxima = {
        "MaxNodes": (minimum, partition.max_nodes, f"{pluralize(minimum, 'node')} (--nodes)"),
        "MaxCPUsPerNode": (
            cpus,
            partition.max_cpus_per_node,
            f"{pluralize(cpus, 'CPU')} per node (ranks per node × --cpus-per-task)",
        ),
        "MaxMemPerNode": (mib, max_mib, f"{mib} MiB of memory per node ({memory})"),
    }
    for setting, (value, maximum, requested) in maxima.items():
        if maximum is not None and value > maximum:
            yield ExceededLimit(
                f"The job requests {requested}, but partition {name} allows at most {maximum} ({setting}). "
                "Request less, or choose another --partition.",
                "PartitionMaxNodes" if setting == "MaxNodes" else None,
            )


def _lifting_qos(site: Site, ask: RunQuery) -> Mapping[str | None, Sequence[str]]:
    """Return the names of the QOS with each flag that lifts a limit, if QOS are enforced (Slurm 22.05)."""
    if site.slurm is None or "qos" not in site.slurm.enforced or site.slurm.enforces_limits != "NO":
        return {}
    lifting: dict[str | None, list[str]] = {}
    try:
        rows = ask(_QOS_FLAGS).splitlines()
    except SchedulerError:
        return {}
    for name, _, flags in (row.partition("|") for row in rows):
        for flag in parsing.parse_names(flags):
            lifting.setdefault(flag, []).append(name)
    return lifting


def waits_for_nodes(request: JobRequest, partitions: Sequence[Partition]) -> bool:
    """Return true if fitting nodes are out of service, and `--test-only` thus rejects what sbatch accepts."""
    for partition in partitions:
        fitting = [group for group in partition.groups if _fits(request, group)]
        has_enough = sum(group.num for group in fitting) >= request.spec.least_granted
        if has_enough and not all(group.is_usable for group in fitting):
            return True
    return False


def _fits(request: JobRequest, group: NodeGroup) -> bool:
    """Return true if the nodes are large enough; their features are not checked."""
    kind = request.spec.gpu_type
    return (
        (group.gpus.get(kind, 0) if kind else group.num_gpus) >= request.spec.gpus_per_node
        and group.cpus >= request.cpus_per_node
        and group.memory_mib >= request.memory_per_node_mib
    )


def _default_notes(request: JobRequest, partition: Partition, site: Site) -> Iterator[str]:
    """Yield what the site's defaults mean for a job without a time limit or a memory request."""
    defaults = {}
    if "time" not in request.directives:
        limit_s = partition.time_without_option_s
        limit = "no time limit" if limit_s is None else f"a time limit of {format_time_limit(limit_s)}"
        defaults["--time"] = limit
    if request.memory_option is None and site.slurm is not None and site.slurm.hands_out_memory:
        per_cpu_mib = partition.def_mem_per_cpu_mib or site.slurm.def_mem_per_cpu_mib
        mib = partition.def_mem_per_node_mib or site.slurm.def_mem_per_node_mib
        unit = "node"
        if per_cpu_mib is not None and partition.def_mem_per_node_mib is None:
            is_batch = request.spec.program == "batch"
            unit, mib = ("CPU", per_cpu_mib) if is_batch else ("node", per_cpu_mib * request.cpus_per_node)
        defaults["--mem"] = f"{mib} MiB of memory per {unit}" if mib else "all memory of its nodes"
    if defaults:
        yield (
            f"Without {' and '.join(defaults)}, the job has {' and '.join(defaults.values())} (default of "
            f"partition {partition.name})."
        )


def _requeue_notes(request: JobRequest, partition: Partition, site: Site) -> Iterator[str]:
    """Yield notes on the end of a job at a preemption or near the time limit.

    Seen with Slurm 22.05: a job with `--requeue` is requeued regardless of JobRequeue. If a preemption
    cancels a job, the supervisor can still requeue the job within the grace time, but not later.
    """
    mode, slurm = request.spec.resume_mode, site.slurm or SlurmConfig()
    saves = "A run that is preempted or approaches its time limit saves its state and"
    if not site.habits.requeue:
        end = f"exits. {_RESUBMIT_HINT}" if mode == "requeue" else f"{_SUCCESSOR_NOTE}."
        yield f"This site does not requeue jobs (requeue: false in the site profile). {saves} {end}"
    elif not slurm.job_requeue and mode == "auto":
        yield (
            f"This site does not requeue jobs by default (JobRequeue=0). {saves} {_SUCCESSOR_NOTE} "
            "(--resume-mode)."
        )
    if site.is_preemptible(partition) and partition.preempt_mode == "CANCEL" and not partition.grace_time_s:
        end = f"ends as FAILED. {_RESUBMIT_HINT}" if mode == "requeue" else f"{_SUCCESSOR_NOTE}."
        yield (
            f"A preempted job in partition {partition.name} is cancelled immediately, not requeued "
            f"(PreemptMode=CANCEL, GraceTime=0). The run has {slurm.kill_wait_s:g} s to save "
            f"(KillWait), and then {end}"
        )


def preflight_slurm(
    spec: JobSpec, script: str, environ: Mapping[str, str], site: Site, gaps: Sequence[str] = ()
) -> PreflightResult:
    """Check a job against its site, and start `sbatch --test-only`, which changes nothing."""
    outer, request = strip_job_env(environ), JobRequest.from_spec(spec, environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer)

    notes, partitions = check_request(request, site, ask)
    notes = [*(f"{gap}. Checks that require this information are skipped." for gap in gaps), *notes]
    # Only Slurm can tell the size of a batch script's job.
    cost = () if spec.program == "batch" else (estimate_cost(request, partitions, site),)
    # Slurm 22.05 also predicts starts in partitions that are down.
    if partitions and all(partition.state == "DOWN" for partition in partitions):
        names = join_or(partition.name for partition in partitions)
        notes.append(f"Partition {names} is down. The job will wait until the partition is up again.")
        return PreflightResult((*notes, *path_notes(spec, ask)), lambda: cost)
    test = JobTest(script, request.variables)
    notes += path_notes(spec, ask)  # while Slurm tests the job

    def refusal() -> str:
        if "node configuration" in (error := test.refusal) and waits_for_nodes(request, partitions):
            return ""
        return error and explain_refusal(error, request, site)

    return PreflightResult(
        tuple(notes), lambda: (describe_start(request.directives, *test.answer), *cost), refusal
    )
