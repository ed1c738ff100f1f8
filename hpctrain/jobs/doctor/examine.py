"""The whole examination: every look at once, each with a limit, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from hpctrain.errors import HpctrainError, SchedulerError
from hpctrain.jobs.backends import is_silent
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.doctor.containers import look_at_containers
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.folder import look_at_folder
from hpctrain.jobs.doctor.machine import ask_torch, look_at_gpus, look_at_machine, torch_findings
from hpctrain.jobs.doctor.network import look_at_network
from hpctrain.jobs.doctor.program import LookFailed
from hpctrain.jobs.doctor.slurm import (
    config_findings,
    look_at_accounting,
    partition_findings,
    qos_findings,
)
from hpctrain.jobs.doctor.tries import Tried, try_options
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.site.facts import Qos, Site
from hpctrain.jobs.site.paths import nodes_are_this_machine
from hpctrain.jobs.site.read import read_qos, read_site
from hpctrain.jobs.slurm_command import run_slurm
from hpctrain.jobs.spec import GpuDirective

_T = TypeVar("_T")
_SLURM_LIMIT_S = 20.0


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    findings: tuple[Finding, ...]
    site: Site | None
    """What the Slurm site is like; None where there is none."""
    gpu_directive: GpuDirective | None = None
    """The only way to ask the site for GPUs, where there is only one."""

    @property
    def problems(self) -> list[Finding]:
        """What will stop jobs."""
        return [finding for finding in self.findings if finding.standing == "problem"]


def examine(environ: Mapping[str, str], runs: Path, profile: Site) -> Report:
    """Look at the site, at this machine and at the folder of the runs.

    Nothing is changed; in the folder of the runs a temporary folder is made, and removed again. A look that
    fails is a line of the report.

    Args:
        environ: the variables of whoever asks.
        runs: where runs are made.
        profile: what the site's profile says.
    """
    outer = outer_environment(environ)
    with ThreadPoolExecutor(max_workers=8) as pool:
        torch = pool.submit(_or_error, lambda: ask_torch(outer))
        gpus = pool.submit(look_at_gpus, outer)
        containers = pool.submit(look_at_containers, outer)
        network = pool.submit(look_at_network, outer)
        slurm = _look_at_slurm(environ, outer, profile, pool)
        folder = pool.submit(
            _guarded, lambda: look_at_folder(runs, outer, other_machines=slurm.other_machines), "Runs folder"
        )
        gpu_findings, gpus_here = gpus.result()
        container_findings, ways = containers.result()
        site = slurm.site
        if site is not None:
            site = replace(site, habits=replace(site.habits, containers=ways))
        gpus_of_site = max((group.num_gpus for group in site.node_groups()), default=0) if site else 0
        return Report(
            findings=(
                *slurm.findings,
                *container_findings,
                *network.result(),
                *folder.result(),
                *look_at_machine(),
                *gpu_findings,
                *torch_findings(torch.result(), gpus_here=gpus_here, gpus_of_site=gpus_of_site),
            ),
            site=site,
            gpu_directive=slurm.gpu_directive,
        )


@dataclass(frozen=True)
class _SlurmLook:
    findings: tuple[Finding, ...]
    site: Site | None = None
    gpu_directive: GpuDirective | None = None
    other_machines: bool = False


def _look_at_slurm(
    environ: Mapping[str, str], outer: Mapping[str, str], profile: Site, pool: ThreadPoolExecutor
) -> _SlurmLook:
    if (trouble := SlurmBackend(environ).trouble()) is not None:
        return _SlurmLook((_without_slurm(trouble),))

    def ask(command: Sequence[str]) -> str:
        return run_slurm(command, outer, timeout_s=_SLURM_LIMIT_S)

    site, gaps = read_site(outer, profile)
    findings = [Finding("Slurm", "answers", gap, "note") for gap in gaps]
    tries = pool.submit(try_options, site, outer)
    here = pool.submit(nodes_are_this_machine, ask)
    if site.slurm is not None:
        findings += config_findings(site.slurm)
        findings.append(look_at_accounting(site.slurm, outer))
    findings += partition_findings(site)
    findings += qos_findings(_every_qos(ask, site))
    tried: Tried = tries.result()
    return _SlurmLook(
        (*findings, *tried.findings),
        replace(site, habits=tried.habits),
        tried.gpu_directive,
        other_machines=not here.result(),
    )


def _without_slurm(trouble: str) -> Finding:
    if not is_silent(trouble):
        return Finding("Slurm", "none", f"{trouble}: runs go to this machine itself")
    return Finding(
        "Slurm",
        "silent",
        trouble,
        "problem",
        "Slurm is set up here and does not answer: try again, or ask who runs it.",
    )


def _every_qos(ask: Callable[[Sequence[str]], str], site: Site) -> list[Qos]:
    if site.slurm is None or not site.slurm.accounting:
        return []
    try:
        return read_qos(ask)
    except SchedulerError:
        return []  # that accounting does not answer is said already


def _guarded(look: Callable[[], list[Finding]], topic: str) -> list[Finding]:
    """What a look finds; a look that fails is a finding, too."""
    try:
        return look()
    except HpctrainError as error:
        return [Finding(topic, "look", f"failed: {error}", "problem", "See to it, and look again.")]


def _or_error(call: Callable[[], _T]) -> _T | LookFailed:
    try:
        return call()
    except LookFailed as error:
        return error
