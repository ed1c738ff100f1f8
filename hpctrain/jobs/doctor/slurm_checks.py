"""Slurm settings, and their consequences for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.site.requeue_notes import is_partition_preemptible
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.site_facts import NodeGroup, Partition, Qos, Site
from hpctrain.text import pluralize

_TOPIC = "Slurm"
_LIMIT_S = 10.0

#: A shorter grace time may be insufficient to write a checkpoint.
_LITTLE_GRACE_S = 10.0
#: With a longer timeout, a dead node stalls the run for too long.
_LONG_SILENCE_S = 600.0


def config_findings(slurm: SlurmConfig) -> Iterator[Finding]:
    """Yield findings on the configuration."""
    yield Finding(_TOPIC, "version", f"{slurm.version}, cluster {slurm.cluster}")
    if slurm.job_requeue:
        at_once = " and start without a delay (enable_expedited_requeue)" if slurm.expedites_requeues else ""
        yield Finding(_TOPIC, "requeue", f"jobs are requeued (JobRequeue=1){at_once}")
    else:
        yield Finding(
            _TOPIC,
            "requeue",
            "only jobs with --requeue are requeued (JobRequeue=0)",
            "note",
            "By default, an interrupted run continues in a successor job. With --resume-mode requeue, the "
            "job is requeued instead. If a plugin prevents requeues, set `requeue: false` under `habits:` "
            "in the site profile.",
        )
    if slurm.requeue_exit:
        yield Finding(
            _TOPIC,
            "RequeueExit",
            slurm.requeue_exit,
            "note",
            "Slurm requeues jobs that end with these exit codes, so Slurm may restart a failed run.",
        )
    if slurm.preempt_type == "none":
        yield Finding(_TOPIC, "preemption", "none")
    else:
        told = "; jobs first receive the signal of their --signal option" if slurm.signals_user else ""
        yield Finding(
            _TOPIC, "preemption", f"by {slurm.preempt_type}, PreemptMode={slurm.preempt_mode}{told}"
        )
    little = slurm.kill_wait_s < _LITTLE_GRACE_S
    yield Finding(
        _TOPIC,
        "KillWait",
        f"{slurm.kill_wait_s:g} s from SIGTERM to SIGKILL when a job is cancelled or reaches its time limit",
        "note" if little else "ok",
        "A cancelled run may not have enough time to save. Before the time limit, runs use the time "
        "set with --stop-before-limit."
        if little
        else "",
    )
    long = slurm.slurmd_timeout_s > _LONG_SILENCE_S or not slurm.slurmd_timeout_s
    after = (
        f"is marked down after {slurm.slurmd_timeout_s:g} s"
        if slurm.slurmd_timeout_s
        else "is never marked down"
    )
    yield Finding(
        _TOPIC,
        "SlurmdTimeout",
        f"an unresponsive node {after}",
        "note" if long else "ok",
        "A node that is not marked down counts as available, even if it does not respond." if long else "",
    )
    yield Finding(_TOPIC, "arrays", f"task numbers up to {slurm.max_array_size - 1} (MaxArraySize)")
    yield Finding(_TOPIC, "nodes", _sharing(slurm))
    most = {"node": slurm.max_mem_per_node_mib, "CPU": slurm.max_mem_per_cpu_mib}
    if limits := [f"at most {mib} MiB per {unit}" for unit, mib in most.items() if mib is not None]:
        yield Finding(_TOPIC, "memory", ", ".join(limits))
    if slurm.enforces_limits == "NO":
        yield Finding(
            _TOPIC,
            "limits",
            "Slurm accepts jobs that exceed the limits of a partition, but never starts them "
            "(EnforcePartLimits=NO); hpctrain rejects them",
        )
    else:
        yield Finding(
            _TOPIC,
            "limits",
            "Slurm rejects jobs that exceed the limits of a partition "
            f"(EnforcePartLimits={slurm.enforces_limits})",
        )


def check_accounting(slurm: SlurmConfig, environ: Mapping[str, str]) -> Finding:
    """Check that job records are kept and can be read."""
    if not slurm.accounting:
        return Finding(
            _TOPIC,
            "accounting",
            "disabled, so sacct is not available",
            "note",
            "Slurm deletes records of finished jobs after a few minutes. hpctrain keeps its own record "
            "in the run folder.",
        )
    try:
        run_slurm(["sacct", "--allocations", "--noheader", "--starttime=now"], environ, timeout_s=_LIMIT_S)
    except SchedulerError as error:
        return Finding(
            _TOPIC,
            "accounting",
            f"slurmdbd does not respond: {error}",
            "note",
            "Until slurmdbd responds, the state of finished jobs is read from the controller and the run "
            "folder.",
        )
    return Finding(_TOPIC, "accounting", "slurmdbd responds")


def partition_findings(site: Site) -> Iterator[Finding]:
    """Yield a finding for each partition."""
    if site.default_partition is None:
        yield Finding(
            "Partitions", "default", "none", "note", "Use --partition, or set `partition` in hpctrain.yaml."
        )
    for partition in site.partitions:
        standing = [*_trouble(partition, site)]
        yield Finding(
            "Partitions",
            f"{partition.name}{' (default)' if partition.default else ''}",
            "; ".join(filter(None, [_nodes(partition.groups), _limits(partition), _end(partition, site)])),
            "note" if standing else "ok",
            " ".join(standing),
        )


def qos_findings(every: Sequence[Qos]) -> Iterator[Finding]:
    """Yield a finding for each QOS that affects jobs."""
    for qos in every:
        words = [
            f"time limit {format_time_limit(qos.max_time_s)}" if qos.max_time_s is not None else "",
            f"PreemptMode={qos.preempt_mode}" if qos.preempt_mode not in ("", "CLUSTER") else "",
            f"grace time {qos.grace_time_s:g} s" if qos.grace_time_s else "",
            ", ".join(qos.flags),
        ]
        if any(words):
            yield Finding("QOS", qos.name, "; ".join(filter(None, words)))


def _sharing(slurm: SlurmConfig) -> str:
    if slurm.select == "linear":
        return "allocated as whole nodes (select/linear)"
    memory = "CPUs, GPUs and memory" if slurm.hands_out_memory else "CPUs and GPUs, but not memory,"
    return f"{memory} are allocated individually (select/{slurm.select})"


def _nodes(groups: Sequence[NodeGroup]) -> str:
    alike: dict[str, int] = {}
    for group in groups:
        gpus = ", ".join(f"{number} {f'{kind} ' if kind else ''}GPUs" for kind, number in group.gpus.items())
        words = f"{pluralize(group.cpus, 'CPU')}, {group.memory_mib} MiB" + (f", {gpus}" if gpus else "")
        alike[words] = alike.get(words, 0) + group.num
    return (
        " + ".join(f"{pluralize(number, 'node')} with {words}" for words, number in alike.items())
        or "no nodes"
    )


def _limits(partition: Partition) -> str:
    default_s = partition.default_time_s
    words = [
        f"time limit {format_time_limit(partition.max_time_s)}"
        if partition.max_time_s is not None
        else "no time limit",
        f"default time {format_time_limit(default_s)}" if default_s is not None else "",
        f"at most {pluralize(partition.max_nodes, 'node')}" if partition.max_nodes is not None else "",
        f"at least {pluralize(partition.min_nodes, 'node')}" if partition.min_nodes > 1 else "",
        f"at most {partition.max_mem_per_node_mib} MiB per node" if partition.max_mem_per_node_mib else "",
        f"at most {partition.max_mem_per_cpu_mib} MiB per CPU" if partition.max_mem_per_cpu_mib else "",
        f"default memory {partition.def_mem_per_cpu_mib} MiB per CPU"
        if partition.def_mem_per_cpu_mib
        else "",
        f"default memory {partition.def_mem_per_node_mib} MiB per node"
        if partition.def_mem_per_node_mib
        else "",
        f"at most {partition.max_cpus_per_node} CPUs per node"
        if partition.max_cpus_per_node is not None
        else "",
        "allocates whole nodes" if partition.whole_nodes else "",
        f"QOS {partition.qos}" if partition.qos else "",
        f"for accounts {', '.join(partition.allow_accounts)}" if partition.allow_accounts is not None else "",
        f"for QOS {', '.join(partition.allow_qos)}" if partition.allow_qos is not None else "",
        f"for groups {', '.join(partition.allow_groups)}" if partition.allow_groups is not None else "",
        "for root only" if partition.root_only else "",
        "requires a reservation" if partition.needs_reservation else "",
    ]
    return ", ".join(filter(None, words))


def _end(partition: Partition, site: Site) -> str:
    """Describe the effect of a preemption on jobs of the partition."""
    if not is_partition_preemptible(partition, site):
        return ""
    return f"preemption: {partition.preempt_mode}, grace time {partition.grace_time_s:g} s"


def _trouble(partition: Partition, site: Site) -> Iterator[str]:
    if partition.state != "UP":
        yield (
            "The partition currently does not accept new jobs, or does not start them "
            f"(State={partition.state})."
        )
    out = sum(group.num for group in partition.groups if group.is_out)
    if out:
        total = pluralize(partition.num_nodes, "node")
        yield f"{out} of {total} {'is' if out == 1 else 'are'} out of service."
    if not is_partition_preemptible(partition, site):
        return
    kill_wait_s = site.slurm.kill_wait_s if site.slurm else SlurmConfig.kill_wait_s
    if partition.preempt_mode == "CANCEL" and not partition.grace_time_s:
        yield "A preempted run saves its state if KillWait is long enough, and continues in a successor job."
    elif "SUSPEND" in partition.preempt_mode:
        yield (
            "A preempted run is suspended until its nodes are free again, and continues to occupy GPU memory."
        )
    elif partition.grace_time_s + kill_wait_s < _LITTLE_GRACE_S:
        grace_s = partition.grace_time_s + kill_wait_s
        yield f"A preempted run has {grace_s:g} s to save (GraceTime + KillWait)."
