"""Probe which job options the site accepts with `sbatch --test-only`, which submits nothing.

A site may reject or require options in a plugin. Slurm's configuration shows only the name of the plugin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.probe import Finding
from hpctrain.slurm.command import run_slurm_parallel
from hpctrain.slurm.site_facts import Site, SiteConventions
from hpctrain.spec.job_spec import GpuRequestStyle

_LIMIT_S = 20.0
_TIME, _MEMORY = "--time=5", "--mem=100M"
#: Ways to request a GPU; the first is preferred if both work.
_GPU: Mapping[GpuRequestStyle, str] = {"gres": "--gres=gpu:1", "gpus-per-node": "--gpus-per-node=1"}
_finding = partial(Finding, "Jobs")


@dataclass(frozen=True)
class ProbeResults:
    """Results of the probes."""

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
        **{way: [*place, _TIME, option] for way, option in _GPU.items()},
        **{f"{way} with memory": [*place, _TIME, _MEMORY, option] for way, option in _GPU.items()},
    }
    commands = [("sbatch", "--test-only", *options, "--wrap=true") for options in probes.values()]
    answers = dict(zip(probes, run_slurm_parallel(commands, environ, timeout_s=_LIMIT_S), strict=True))
    refusals = {
        name: _reason(answer) for name, answer in answers.items() if isinstance(answer, SchedulerError)
    }
    if {"plain", "no memory", "no time", "neither"} <= refusals.keys():
        remedy = "Set the options that this site requires, such as --account, in hpctrain.yaml."
        finding = _finding("a plain job", f"refused: {refusals['no memory']}", remedy, "problem")
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
    ways = [way for way in _GPU if f"{way}{suffix}" not in refusals] if with_gpus else []
    findings = [
        _finding("a plain job", "accepted"),
        _memory(refusals, habits, site),
        _finding("time limit", f"required: {needs_time}", "Always set --time.")
        if needs_time is not None
        else _finding("time limit", "optional"),
        *(_gpus(ways, refusals, suffix) if with_gpus else [_finding("GPUs", "none in any partition")]),
    ]
    return ProbeResults(tuple(findings), habits, ways[0] if len(ways) == 1 else None)


def _reason(error: SchedulerError) -> str:
    """Return the reason for a rejection; only the plugin's message if there is one."""
    messages = str(error).removeprefix("sbatch failed: ").split("; ")
    return "; ".join([message for message in messages if "Unspecified error" not in message] or messages)


def _memory(refusals: Mapping[str, str], habits: SiteConventions, site: Site) -> Finding:
    slurm, name = site.slurm, "memory"
    if habits.memory_option == "refused":
        return _finding(name, f"--mem is rejected: {refusals['plain']}", "Do not use --mem.")
    if habits.needs_memory:
        return _finding(name, f"required: {refusals['no memory']}", "Always set --mem.")
    if slurm is None:
        return _finding(name, "--mem is accepted")
    if not slurm.hands_out_memory:
        return _finding(name, "--mem only selects nodes with enough memory; usage is not limited")
    if slurm.default_memory_mib is None:
        remedy = "If jobs share nodes, always set --mem. Otherwise, each job waits for empty nodes."
        return _finding(name, "a job without --mem requests all memory on its nodes", remedy)
    unit = "node" if slurm.def_mem_per_node_mib else "CPU"
    return _finding(name, f"a job without --mem receives {slurm.default_memory_mib} MiB per {unit}")


def _gpus(ways: list[GpuRequestStyle], refusals: Mapping[str, str], suffix: str) -> Iterator[Finding]:
    rejected = {way: refusals[f"{way}{suffix}"] for way in _GPU if way not in ways}
    if not ways:
        remedy = "Set the options that GPU jobs require at this site, such as --account or --partition."
        yield _finding("GPUs", f"refused: {rejected['gres']}", remedy)
        return
    value = f"can be requested with {' or '.join(f'--{way}' for way in ways)}"
    value += "".join(f"; --{way} is rejected: {reason}" for way, reason in rejected.items())
    remedy = "Set `gpu_request_style: gpus-per-node` in hpctrain.yaml or in the site profile."
    yield _finding("GPUs", value, "" if "gres" in ways else remedy)
