"""Check Slurm's settings and their consequences for a run, and probe which job options the site accepts.

A site may reject or require options in a plugin, of which Slurm's configuration shows only the name.
Therefore, `sbatch --test-only`, which submits nothing, tests some jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.probe import Finding
from hpctrain.jobspec.job_spec import GpuRequestStyle
from hpctrain.slurm.command import run_slurm, run_slurm_parallel
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.site_facts import Partition, Site, SiteConventions

_LIMIT_S = 20.0
#: A shorter grace time may be insufficient to write a checkpoint.
_LITTLE_GRACE_S = 10.0
_TIME, _MEMORY = "--time=5", "--mem=100M"
#: Ways to request a GPU; the first is preferred if both work.
_GPU: Mapping[GpuRequestStyle, str] = {"gres": "--gres=gpu:1", "gpus-per-node": "--gpus-per-node=1"}
_finding = partial(Finding, "Slurm")
_job_finding = partial(Finding, "Jobs")


def config_findings(slurm: SlurmConfig) -> Iterator[Finding]:
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
    mode = f"by {slurm.preempt_type}, PreemptMode={slurm.preempt_mode}"
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


def check_accounting(slurm: SlurmConfig, environ: Mapping[str, str]) -> Finding:
    value = "slurmdbd responds"
    if not slurm.accounting:
        value = "disabled, so sacct is not available"
    else:
        try:
            command = ["sacct", "--allocations", "--noheader", "--starttime=now"]
            run_slurm(command, environ, timeout_s=_LIMIT_S)
            return _finding("accounting", value)
        except SchedulerError as error:
            value = f"slurmdbd does not respond: {error}"
    return _finding(
        "accounting",
        value,
        "Slurm deletes records of finished jobs after a few minutes. hpctrain keeps its own record in the "
        "run folder.",
    )


def partition_findings(site: Site) -> Iterator[Finding]:
    if site.default_partition is None:
        remedy = "Use --partition, or set `partition` in hpctrain.yaml."
        yield Finding("Partitions", "default", "none", remedy)
    for partition in site.partitions:
        value = f"{partition.describe_nodes()}; {partition.describe_limits()}"
        if site.is_preemptible(partition):
            value += f"; preemption: {partition.preempt_mode}, grace time {partition.grace_time_s:g} s"
        name = f"{partition.name}{' (default)' if partition.default else ''}"
        yield Finding("Partitions", name, value, " ".join(_obstacles(partition, site)))


def _obstacles(partition: Partition, site: Site) -> Iterator[str]:
    if partition.state != "UP":
        yield f"The partition accepts or starts no new jobs now (State={partition.state})."
    if not site.is_preemptible(partition):
        return
    grace_s = partition.grace_time_s + (site.slurm or SlurmConfig()).kill_wait_s
    if "SUSPEND" in partition.preempt_mode:
        yield "A preempted run is suspended, and continues to occupy GPU memory."
    elif grace_s < _LITTLE_GRACE_S:
        yield f"A preempted run has {grace_s:g} s to save (GraceTime + KillWait)."


@dataclass(frozen=True)
class ProbeResults:
    findings: tuple[Finding, ...]
    habits: SiteConventions
    gpu_request_style: GpuRequestStyle | None = None
    """The only accepted way to request a GPU; None if both or neither are accepted."""


def probe_options(site: Site, environ: Mapping[str, str]) -> ProbeResults:
    """Test short jobs with and without individual options."""
    with_gpus = [
        partition
        for partition in sorted(site.partitions, key=lambda partition: not partition.default)
        if partition.state == "UP" and any(group.num_gpus for group in partition.groups)
    ]
    place = [f"--partition={with_gpus[0].name}"] if with_gpus and not with_gpus[0].default else []
    probes = {
        "plain": [_TIME, _MEMORY],
        "no memory": [_TIME],
        "no time": [_MEMORY],
        "neither": [],
        **{style: [*place, _TIME, option] for style, option in _GPU.items()},
        **{f"{style} with memory": [*place, _TIME, _MEMORY, option] for style, option in _GPU.items()},
    }
    commands = [("sbatch", "--test-only", *options, "--wrap=true") for options in probes.values()]
    answers = dict(zip(probes, run_slurm_parallel(commands, environ, timeout_s=_LIMIT_S), strict=True))
    refusals = {name: _reason(reply) for name, reply in answers.items() if isinstance(reply, SchedulerError)}
    if {"plain", "no memory", "no time", "neither"} <= refusals.keys():
        remedy = "Set the options that this site requires, such as --account, in hpctrain.yaml."
        finding = _job_finding("a plain job", f"refused: {refusals['no memory']}", remedy, "problem")
        return ProbeResults((finding,), site.habits)
    needs_memory = "no memory" in refusals and "plain" not in refusals
    refuses_memory = "plain" in refusals and "no memory" not in refusals
    # If one option is always rejected, test the other option without it.
    needs_time = refusals.get("neither" if refuses_memory else "no time")
    shares_memory = site.slurm is None or site.slurm.hands_out_memory
    habits = replace(
        site.habits,
        memory_option="refused" if refuses_memory else "accepted" if shares_memory else "ignored",
        needs_time=needs_time is not None,
        needs_memory=needs_memory,
    )
    suffix = " with memory" if needs_memory else ""
    styles = [style for style in _GPU if f"{style}{suffix}" not in refusals] if with_gpus else []
    findings = [
        _job_finding("a plain job", "accepted"),
        _memory(refusals, habits, site),
        _job_finding("time limit", f"required: {needs_time}", "Always set --time.")
        if needs_time is not None
        else _job_finding("time limit", "optional"),
        _gpus(styles, refusals, suffix) if with_gpus else _job_finding("GPUs", "none in any partition"),
    ]
    return ProbeResults(tuple(findings), habits, styles[0] if len(styles) == 1 else None)


def _reason(error: SchedulerError) -> str:
    """Return the reason for a rejection; only the plugin's message if there is one."""
    messages = str(error).removeprefix("sbatch failed: ").split("; ")
    return "; ".join([message for message in messages if "Unspecified error" not in message] or messages)


def _memory(refusals: Mapping[str, str], habits: SiteConventions, site: Site) -> Finding:
    value, remedy = "--mem is accepted", ""
    if habits.memory_option == "refused":
        value, remedy = f"--mem is rejected: {refusals['plain']}", "Do not use --mem."
    elif habits.needs_memory:
        value, remedy = f"required: {refusals['no memory']}", "Always set --mem."
    elif habits.memory_option == "ignored":
        value = "--mem only selects nodes with enough memory; usage is not limited"
    elif site.slurm is not None and site.slurm.default_memory_mib is None:
        value = "a job without --mem requests all memory on its nodes"
        remedy = "If jobs share nodes, always set --mem. Otherwise, each job waits for empty nodes."
    return _job_finding("memory", value, remedy)


def _gpus(styles: list[GpuRequestStyle], refusals: Mapping[str, str], suffix: str) -> Finding:
    rejected = {style: refusals[f"{style}{suffix}"] for style in _GPU if style not in styles}
    if not styles:
        remedy = "Set the options that GPU jobs require at this site, such as --account or --partition."
        return _job_finding("GPUs", f"refused: {rejected['gres']}", remedy)
    value = f"can be requested with {' or '.join(f'--{style}' for style in styles)}"
    value += "".join(f"; --{style} is rejected: {reason}" for style, reason in rejected.items())
    remedy = "Set `gpu_request_style: gpus-per-node` in hpctrain.yaml or in the site profile."
    return _job_finding("GPUs", value, "" if "gres" in styles else remedy)
