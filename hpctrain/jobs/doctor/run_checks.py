"""Run all checks concurrently, each with a time limit, and write their findings to a site profile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, UserError
from hpctrain.files import write_atomic
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
from hpctrain.jobs.doctor.slurm_checks import (
    check_accounting,
    config_findings,
    partition_findings,
    probe_options,
)
from hpctrain.jobs.options.option_parser import SITE_KEY
from hpctrain.jobspec.job_spec import GpuRequestStyle
from hpctrain.slurm.command import is_transient, run_slurm
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_facts import Site, SiteConventions, discover_site, nodes_are_this_machine

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
        return [finding for finding in self.findings if finding.standing == "problem"]


def run_checks(environ: Mapping[str, str], runs: Path, habits: SiteConventions) -> DoctorReport:
    """Check the site, this machine and the runs folder, in which a temporary folder is created."""
    outer = strip_job_env(environ)

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer, timeout_s=_SLURM_LIMIT_S)

    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(query_torch, outer)
        gpus = pool.submit(check_gpus, outer)
        containers = pool.submit(check_containers, outer)
        is_one_machine = pool.submit(nodes_are_this_machine, ask)
        slurm = _check_slurm(environ, outer, habits, pool)
        other_machines = slurm.site is not None and not is_one_machine.result()
        folder = pool.submit(_check_folder, runs, outer, other_machines=other_machines)
        container_findings, runtimes = containers.result()
        gpu_findings, gpus_here = gpus.result()
        gpus_of_site = 0
        if (site := slurm.site) is not None:
            site = replace(site, habits=replace(site.habits, containers=runtimes))
            gpus_of_site = max((group.num_gpus for group in site.node_groups()), default=0)
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
    if (trouble := SlurmBackend(environ).unavailable_reason()) is not None:
        finding = Finding("Slurm", "none", f"{trouble}, so runs will use this machine")
        if is_transient(trouble):
            remedy = (
                "Slurm is set up on this machine but does not respond. Try again, or ask the administrator."
            )
            finding = Finding("Slurm", "no response", trouble, remedy, "problem")
        return DoctorReport((finding,))
    site, gaps = discover_site(outer, habits)
    probes = pool.submit(probe_options, site, outer)
    findings = [Finding("Slurm", "answers", gap, standing="note") for gap in gaps]
    if site.slurm is not None:
        findings += [*config_findings(site.slurm), check_accounting(site.slurm, outer)]
    findings += partition_findings(site)
    results = probes.result()
    site = replace(site, habits=results.habits)
    return DoctorReport((*findings, *results.findings), site, results.gpu_request_style)


def _check_folder(runs: Path, environ: Mapping[str, str], *, other_machines: bool) -> list[Finding]:
    try:
        return list(check_runs_folder(runs, environ, other_machines=other_machines))
    except HpctrainError as error:
        remedy = "Check the file system, or use another --run-dir."
        return [Finding("Runs folder", "check", f"failed: {error}", remedy, "problem")]


def profile_options(report: DoctorReport) -> dict[str, Any]:
    if report.site is None:
        raise UserError(
            "Cannot write a site profile: Slurm is not available on this machine. Run this command on a "
            "login node."
        )
    style = report.gpu_request_style
    defaults = asdict(SiteConventions())
    habits = {name: value for name, value in asdict(report.site.habits).items() if value != defaults[name]}
    habits |= {name: list(value) for name, value in habits.items() if isinstance(value, tuple)}
    options = {} if style in (None, "gres") else {"gpu_request_style": style}
    return {**options, SITE_KEY: {"habits": habits}}


def write_profile_file(report: DoctorReport, path: Path) -> None:
    """Write the profile to a new file."""
    import yaml

    options = profile_options(report)
    if path.exists():
        raise UserError(f"{str(path)!r} exists already. Choose another file, or remove it.")
    cluster = report.site.slurm.cluster if report.site and report.site.slurm else "this site"
    head = (
        f"# Profile of {cluster}, written by `hpctrain doctor --write` on {time.strftime('%Y-%m-%d')}.\n"
        "# hpctrain reads it from /etc/hpctrain, or from the folder in HPCTRAIN_SITE_CONFIG.\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, head + yaml.safe_dump(options, sort_keys=False))
