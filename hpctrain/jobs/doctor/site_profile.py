"""Test which options a site requires or rejects, and write its profile.

A site may reject or require options in a plugin, of which Slurm's configuration shows only the name.
Therefore, `sbatch --test-only`, which submits nothing, tests some jobs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from hpctrain.errors import SchedulerError, UserError
from hpctrain.files import write_atomic
from hpctrain.jobs.doctor.probe import DoctorReport, Finding
from hpctrain.jobs.options.option_parser import SITE_KEY
from hpctrain.jobspec.job_spec import GpuRequestStyle
from hpctrain.slurm.command import SlurmCall, run_all
from hpctrain.slurm.site_facts import Site, SiteConventions

#: Time limit of a Slurm command, in seconds.
SLURM_LIMIT_S = 20.0
_TIME, _MEMORY = "--time=5", "--mem=100M"
#: Ways to request a GPU; the first is preferred if both work.
_GPU: Mapping[GpuRequestStyle, str] = {"gres": "--gres=gpu:1", "gpus-per-node": "--gpus-per-node=1"}
_job_finding = partial(Finding, "Jobs")


def probe_options(site: Site, environ: Mapping[str, str]) -> DoctorReport:
    """Test short jobs with and without individual options, and complete the rules of the site."""
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
    calls = [SlurmCall(command, environ, timeout_s=SLURM_LIMIT_S) for command in commands]
    answers = dict(zip(probes, run_all(calls), strict=True))
    refusals = {name: _reason(reply) for name, reply in answers.items() if isinstance(reply, SchedulerError)}
    if {"plain", "no memory", "no time", "neither"} <= refusals.keys():
        remedy = "Set the options that this site requires, such as --account, in hpctrain.yaml."
        finding = _job_finding("a plain job", f"refused: {refusals['no memory']}", remedy, "problem")
        return DoctorReport((finding,), site)
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
    return DoctorReport(
        tuple(findings), replace(site, habits=habits), styles[0] if len(styles) == 1 else None
    )


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
    elif (slurm := site.slurm) and not (slurm.def_mem_per_node_mib or slurm.def_mem_per_cpu_mib):
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
