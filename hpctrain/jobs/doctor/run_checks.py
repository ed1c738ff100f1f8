"""The complete diagnosis: all checks run concurrently, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hpctrain.errors import HpctrainError, SchedulerError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor.container_checks import check_containers
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.folder_checks import check_runs_folder
from hpctrain.jobs.doctor.machine_checks import check_gpus, check_machine, query_torch, torch_findings
from hpctrain.jobs.doctor.network_checks import check_network
from hpctrain.jobs.doctor.probe_command import ProbeFailed
from hpctrain.jobs.doctor.sbatch_probes import ProbeResults, probe_options
from hpctrain.jobs.doctor.slurm_checks import (
    check_accounting,
    config_findings,
    partition_findings,
    qos_findings,
)
from hpctrain.jobs.site.path_visibility import nodes_are_this_machine
from hpctrain.slurm.command import is_transient, run_slurm
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_discovery import discover_site, query_qos
from hpctrain.slurm.site_facts import Qos, Site
from hpctrain.spec.job_spec import GpuRequestStyle

_T = TypeVar("_T")
_SLURM_LIMIT_S = 20.0


@dataclass(frozen=True)
class DoctorReport:
    """All findings of the diagnosis."""

    findings: tuple[Finding, ...]
    site: Site | None
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
    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(_or_error, lambda: query_torch(outer))
        gpus = pool.submit(check_gpus, outer)
        containers = pool.submit(check_containers, outer)
        network = pool.submit(check_network, outer)
        slurm = _check_slurm(environ, outer, profile, pool)
        folder = pool.submit(
            _guarded,
            lambda: check_runs_folder(runs, outer, other_machines=slurm.other_machines),
            "Runs folder",
        )
        gpu_findings, gpus_here = gpus.result()
        container_findings, ways = containers.result()
        site = slurm.site
        if site is not None:
            site = replace(site, habits=replace(site.habits, containers=ways))
        gpus_of_site = max((group.num_gpus for group in site.node_groups()), default=0) if site else 0
        return DoctorReport(
            findings=(
                *slurm.findings,
                *container_findings,
                *network.result(),
                *folder.result(),
                *check_machine(),
                *gpu_findings,
                *torch_findings(torch.result(), gpus_here=gpus_here, gpus_of_site=gpus_of_site),
            ),
            site=site,
            gpu_request_style=slurm.gpu_request_style,
        )


@dataclass(frozen=True)
class _SlurmFindings:
    findings: tuple[Finding, ...]
    site: Site | None = None
    gpu_request_style: GpuRequestStyle | None = None
    other_machines: bool = False


def _check_slurm(
    environ: Mapping[str, str], outer: Mapping[str, str], profile: Site, pool: ThreadPoolExecutor
) -> _SlurmFindings:
    if (trouble := SlurmBackend(environ).unavailable_reason()) is not None:
        return _SlurmFindings((_without_slurm(trouble),))

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer, timeout_s=_SLURM_LIMIT_S)

    site, gaps = discover_site(outer, profile)
    findings = [Finding("Slurm", "answers", gap, "note") for gap in gaps]
    tries = pool.submit(probe_options, site, outer)
    here = pool.submit(nodes_are_this_machine, ask)
    if site.slurm is not None:
        findings += config_findings(site.slurm)
        findings.append(check_accounting(site.slurm, outer))
    findings += partition_findings(site)
    findings += qos_findings(_every_qos(ask, site))
    tried: ProbeResults = tries.result()
    return _SlurmFindings(
        (*findings, *tried.findings),
        replace(site, habits=tried.habits),
        tried.gpu_request_style,
        other_machines=not here.result(),
    )


def _without_slurm(trouble: str) -> Finding:
    if not is_transient(trouble):
        return Finding("Slurm", "none", f"{trouble}, so runs will use this machine")
    return Finding(
        "Slurm",
        "no response",
        trouble,
        "problem",
        "Slurm is set up on this machine but does not respond. Try again, or ask the administrator.",
    )


def _every_qos(ask: Callable[[Sequence[str]], str], site: Site) -> list[Qos]:
    if site.slurm is None or not site.slurm.accounting:
        return []
    try:
        return query_qos(ask)
    except SchedulerError:
        return []  # check_accounting reports it


def _guarded(look: Callable[[], list[Finding]], topic: str) -> list[Finding]:
    """Return the findings of a check; a failed check is reported as a finding."""
    try:
        return look()
    except HpctrainError as error:
        return [
            Finding(
                topic,
                "check",
                f"failed: {error}",
                "problem",
                "Check the file system, or use another --run-dir.",
            )
        ]


def _or_error(call: Callable[[], _T]) -> _T | ProbeFailed:
    try:
        return call()
    except ProbeFailed as error:
        return error
