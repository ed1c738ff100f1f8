"""Check Slurm's settings, and their consequences for a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.probe import Finding
from hpctrain.jobs.site.site_check import is_preemptible
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.site_facts import Partition, Qos, Site
from hpctrain.text import pluralize

_LIMIT_S = 10.0
#: A shorter grace time may be insufficient to write a checkpoint.
_LITTLE_GRACE_S = 10.0
#: With a longer timeout, a dead node stalls the run for too long.
_LONG_SILENCE_S = 600.0
_finding = partial(Finding, "Slurm")


def config_findings(slurm: SlurmConfig) -> Iterator[Finding]:
    """Yield findings on the configuration."""
    yield _finding("version", f"{slurm.version}, cluster {slurm.cluster}")
    if slurm.job_requeue:
        delay = " and start without a delay (enable_expedited_requeue)" if slurm.expedites_requeues else ""
        yield _finding("requeue", f"jobs are requeued (JobRequeue=1){delay}")
    else:
        yield _finding(
            "requeue",
            "only jobs with --requeue are requeued (JobRequeue=0)",
            "By default, an interrupted run continues in a successor job. With --resume-mode requeue, the "
            "job is requeued instead. If a plugin prevents requeues, set `requeue: false` under `habits:` "
            "in the site profile.",
        )
    if slurm.requeue_exit:
        remedy = "Slurm requeues jobs that end with these exit codes, so Slurm may restart a failed run."
        yield _finding("RequeueExit", slurm.requeue_exit, remedy)
    mode = f"by {slurm.preempt_type}, PreemptMode={slurm.preempt_mode}"
    mode += "; jobs first receive the signal of their --signal option" if slurm.signals_user else ""
    yield _finding("preemption", "none" if slurm.preempt_type == "none" else mode)
    remedy = (
        "A cancelled run may not have enough time to save. Before the time limit, runs use the time "
        "set with --stop-before-limit."
    )
    yield _finding(
        "KillWait",
        f"{slurm.kill_wait_s:g} s from SIGTERM to SIGKILL when a job is cancelled or reaches its time limit",
        remedy if slurm.kill_wait_s < _LITTLE_GRACE_S else "",
    )
    timeout_s = slurm.slurmd_timeout_s
    mark = f"marked down after {timeout_s:g} s" if timeout_s else "never marked down"
    remedy = "A node that is not marked down counts as available, even if it does not respond."
    yield _finding(
        "SlurmdTimeout",
        f"an unresponsive node is {mark}",
        "" if 0 < timeout_s <= _LONG_SILENCE_S else remedy,
    )
    yield _finding("arrays", f"task numbers up to {slurm.max_array_size - 1} (MaxArraySize)")
    resources = "CPUs, GPUs and memory" if slurm.hands_out_memory else "CPUs and GPUs, but not memory,"
    sharing = f"{resources} are allocated individually (select/{slurm.select})"
    is_linear = slurm.select == "linear"
    yield _finding("nodes", "allocated as whole nodes (select/linear)" if is_linear else sharing)
    most_mib = {"node": slurm.max_mem_per_node_mib, "CPU": slurm.max_mem_per_cpu_mib}
    if limits := [f"at most {mib} MiB per {unit}" for unit, mib in most_mib.items() if mib is not None]:
        yield _finding("memory", ", ".join(limits))
    accepts = "accepts jobs that exceed the limits of a partition, but never starts them"
    setting = f"(EnforcePartLimits={slurm.enforces_limits})"
    if slurm.enforces_limits == "NO":
        yield _finding("limits", f"Slurm {accepts} {setting}; hpctrain rejects them")
    else:
        yield _finding("limits", f"Slurm rejects jobs that exceed the limits of a partition {setting}")


def check_accounting(slurm: SlurmConfig, environ: Mapping[str, str]) -> Finding:
    """Check that job records are kept and can be read."""
    if not slurm.accounting:
        return _finding(
            "accounting",
            "disabled, so sacct is not available",
            "Slurm deletes records of finished jobs after a few minutes. hpctrain keeps its own record "
            "in the run folder.",
        )
    try:
        run_slurm(["sacct", "--allocations", "--noheader", "--starttime=now"], environ, timeout_s=_LIMIT_S)
    except SchedulerError as error:
        return _finding(
            "accounting",
            f"slurmdbd does not respond: {error}",
            "Until slurmdbd responds, the state of finished jobs is read from the controller and the run "
            "folder.",
        )
    return _finding("accounting", "slurmdbd responds")


def partition_findings(site: Site) -> Iterator[Finding]:
    """Yield a finding for each partition."""
    if site.default_partition is None:
        yield Finding(
            "Partitions", "default", "none", "Use --partition, or set `partition` in hpctrain.yaml."
        )
    for partition in site.partitions:
        value = f"{partition.describe_nodes()}; {partition.describe_limits()}"
        if is_preemptible(partition, site):
            value += f"; preemption: {partition.preempt_mode}, grace time {partition.grace_time_s:g} s"
        name = f"{partition.name}{' (default)' if partition.default else ''}"
        yield Finding("Partitions", name, value, " ".join(_obstacles(partition, site)))


def _obstacles(partition: Partition, site: Site) -> Iterator[str]:
    if partition.state != "UP":
        yield (
            "The partition currently does not accept new jobs, or does not start them "
            f"(State={partition.state})."
        )
    if out := sum(group.num for group in partition.groups if group.is_out):
        total = pluralize(partition.num_nodes, "node")
        yield f"{out} of {total} {'is' if out == 1 else 'are'} out of service."
    if not is_preemptible(partition, site):
        return
    grace_s = partition.grace_time_s + (site.slurm or SlurmConfig()).kill_wait_s
    if partition.preempt_mode == "CANCEL" and not partition.grace_time_s:
        yield "A preempted run saves its state if KillWait is long enough, and continues in a successor job."
    elif "SUSPEND" in partition.preempt_mode:
        yield (
            "A preempted run is suspended until its nodes are free again, and continues to occupy GPU memory."
        )
    elif grace_s < _LITTLE_GRACE_S:
        yield f"A preempted run has {grace_s:g} s to save (GraceTime + KillWait)."


def qos_findings(every_qos: Sequence[Qos]) -> Iterator[Finding]:
    """Yield a finding for each QOS that affects jobs."""
    for qos in every_qos:
        effects = [
            f"time limit {format_time_limit(qos.max_time_s)}" if qos.max_time_s is not None else "",
            f"PreemptMode={qos.preempt_mode}" if qos.preempt_mode not in ("", "CLUSTER") else "",
            f"grace time {qos.grace_time_s:g} s" if qos.grace_time_s else "",
            ", ".join(qos.flags),
        ]
        if any(effects):
            yield Finding("QOS", qos.name, "; ".join(filter(None, effects)))
