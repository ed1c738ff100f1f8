"""Check the Slurm site, this machine and the runs folder concurrently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor.machine_checks import (
    check_containers,
    check_gpus,
    check_machine,
    check_network,
    check_runs_folder,
    query_torch,
    torch_findings,
)
from hpctrain.jobs.doctor.probe import DoctorReport, Finding
from hpctrain.jobs.doctor.site_profile import SLURM_LIMIT_S, probe_options
from hpctrain.slurm.command import is_transient, run_slurm
from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_facts import Partition, Site, SiteConventions, nodes_are_this_machine

#: A shorter grace time may be insufficient to write a checkpoint.
_LITTLE_GRACE_S = 10.0
_finding = partial(Finding, "Slurm")


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
    value = "disabled, so sacct is not available"
    if slurm.accounting:
        command = ["sacct", "--allocations", "--noheader", "--starttime=now"]
        try:
            run_slurm(command, environ, timeout_s=SLURM_LIMIT_S)
            return _finding("accounting", "slurmdbd responds")
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


def run_checks(environ: Mapping[str, str], runs: Path, habits: SiteConventions) -> DoctorReport:
    """Check the site, this machine and the runs folder, in which a temporary folder is created."""
    outer = strip_job_env(environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer, timeout_s=SLURM_LIMIT_S)

    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(query_torch, outer)
        gpus = pool.submit(check_gpus, outer)
        containers = pool.submit(check_containers, outer)
        is_one_machine = pool.submit(nodes_are_this_machine, ask)
        slurm = _check_slurm(environ, outer, habits, pool)
        other_machines = slurm.site is not None and not is_one_machine.result()
        folder = pool.submit(check_runs_folder, runs, outer, other_machines=other_machines)
        container_findings, runtimes = containers.result()
        gpu_findings, gpus_here = gpus.result()
        gpus_of_site = 0
        if (site := slurm.site) is not None:
            site = replace(site, habits=replace(site.habits, containers=runtimes))
            groups = (group for partition in site.partitions for group in partition.groups)
            gpus_of_site = max((group.num_gpus for group in groups), default=0)
        findings = (
            *slurm.findings,
            *container_findings,
            *check_network(),
            *folder.result(),
            *check_machine(),
            *gpu_findings,
            *torch_findings(torch.result(), gpus_here=gpus_here, gpus_of_site=gpus_of_site),
        )
        return replace(slurm, findings=findings, site=site)


def _check_slurm(
    environ: Mapping[str, str], outer: Mapping[str, str], habits: SiteConventions, pool: ThreadPoolExecutor
) -> DoctorReport:
    backend = SlurmBackend(environ)
    if (trouble := backend.unavailable_reason()) is not None:
        finding = Finding("Slurm", "none", f"{trouble}, so runs will use this machine")
        if is_transient(trouble):
            remedy = (
                "Slurm is set up on this machine but does not respond. Try again, or ask the administrator."
            )
            finding = Finding("Slurm", "no response", trouble, remedy, "problem")
        return DoctorReport((finding,))
    site, gaps = backend.site_with_gaps(habits)
    probes = pool.submit(probe_options, site, outer)
    findings = [Finding("Slurm", "answers", gap, standing="note") for gap in gaps]
    if site.slurm is not None:
        findings += [*config_findings(site.slurm), check_accounting(site.slurm, outer)]
    findings += partition_findings(site)
    report = probes.result()
    return replace(report, findings=(*findings, *report.findings))
