"""Run all checks concurrently, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.errors import HpctrainError, SchedulerError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor.folder_checks import check_runs_folder
from hpctrain.jobs.doctor.machine_checks import (
    check_containers,
    check_gpus,
    check_machine,
    check_network,
    query_torch,
    torch_findings,
)
from hpctrain.jobs.doctor.probe import Finding
from hpctrain.jobs.doctor.sbatch_probes import probe_options
from hpctrain.jobs.doctor.slurm_checks import (
    check_accounting,
    config_findings,
    partition_findings,
    qos_findings,
)
from hpctrain.jobs.site.mounts import nodes_are_this_machine
from hpctrain.slurm.command import is_transient, run_slurm
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_facts import Qos, Site, discover_site, query_qos
from hpctrain.spec.job_spec import GpuRequestStyle

_SLURM_LIMIT_S = 20.0


@dataclass(frozen=True)
class DoctorReport:
    """All findings of the diagnosis."""

    findings: tuple[Finding, ...]
    site: Site | None = None
    """The Slurm site; None if there is none."""
    gpu_request_style: GpuRequestStyle | None = None
    """The only accepted way to request GPUs; None if there are others."""

    @property
    def problems(self) -> list[Finding]:
        """Findings that prevent jobs from running."""
        return [finding for finding in self.findings if finding.standing == "problem"]


def run_checks(environ: Mapping[str, str], runs: Path, profile: Site) -> DoctorReport:
    """Check the site, this machine and the runs folder.

    The only change is a temporary folder in the runs folder, which is removed afterwards. A failed check is
    reported as a finding.

    Args:
        environ: environment of the caller.
        runs: parent of the run folders.
        profile: the site as described by its profile.
    """
    outer = strip_job_env(environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer, timeout_s=_SLURM_LIMIT_S)

    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(query_torch, outer)
        gpus = pool.submit(check_gpus, outer)
        containers = pool.submit(check_containers, outer)
        network = pool.submit(check_network, outer)
        here = pool.submit(nodes_are_this_machine, ask)
        slurm = _check_slurm(environ, outer, profile, pool, ask)
        site = slurm.site
        folder = pool.submit(
            _check_folder, runs, outer, other_machines=site is not None and not here.result()
        )
        container_findings, runtimes = containers.result()
        if site is not None:
            site = replace(site, habits=replace(site.habits, containers=runtimes))
        gpu_findings, gpus_here = gpus.result()
        gpus_of_site = max((group.num_gpus for group in site.node_groups()), default=0) if site else 0
        findings = (
            *slurm.findings,
            *container_findings,
            *network.result(),
            *folder.result(),
            *check_machine(),
            *gpu_findings,
            *torch_findings(torch.result(), gpus_here=gpus_here, gpus_of_site=gpus_of_site),
        )
        return replace(slurm, findings=findings, site=site)


def _check_slurm(
    environ: Mapping[str, str],
    outer: Mapping[str, str],
    profile: Site,
    pool: ThreadPoolExecutor,
    ask: Callable[[Sequence[str]], str],
) -> DoctorReport:
    if (trouble := SlurmBackend(environ).unavailable_reason()) is not None:
        finding = Finding("Slurm", "none", f"{trouble}, so runs will use this machine")
        if is_transient(trouble):
            remedy = (
                "Slurm is set up on this machine but does not respond. Try again, or ask the administrator."
            )
            finding = Finding("Slurm", "no response", trouble, remedy, "problem")
        return DoctorReport((finding,))
    site, gaps = discover_site(outer, profile)
    probes = pool.submit(probe_options, site, outer)
    findings = [Finding("Slurm", "answers", gap, standing="note") for gap in gaps]
    every_qos: list[Qos] = []
    if site.slurm is not None:
        findings += [*config_findings(site.slurm), check_accounting(site.slurm, outer)]
        if site.slurm.accounting:
            with suppress(SchedulerError):  # check_accounting reports it
                every_qos = query_qos(ask)
    findings += [*partition_findings(site), *qos_findings(every_qos)]
    results = probes.result()
    site = replace(site, habits=results.habits)
    return DoctorReport((*findings, *results.findings), site, results.gpu_request_style)


def _check_folder(runs: Path, environ: Mapping[str, str], *, other_machines: bool) -> list[Finding]:
    try:
        return list(check_runs_folder(runs, environ, other_machines=other_machines))
    except HpctrainError as error:
        remedy = "Check the file system, or use another --run-dir."
        return [Finding("Runs folder", "check", f"failed: {error}", remedy, "problem")]
