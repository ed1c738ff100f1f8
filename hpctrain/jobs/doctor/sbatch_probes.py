"""Job options that the site accepts, probed with `sbatch --test-only`, which submits nothing.

A site may reject or require options in a plugin. Slurm's configuration shows only the name of the plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.slurm.command import run_slurm_parallel
from hpctrain.slurm.site_facts import MemoryOptionSupport, Partition, Site, SiteConventions
from hpctrain.spec.job_spec import GpuRequestStyle

_TOPIC = "Jobs"
_LIMIT_S = 20.0

_TIME = ("--time=5",)
_MEMORY = ("--mem=100M",)
#: Ways to request a GPU; the first is preferred if both work.
_GPU: Mapping[GpuRequestStyle, tuple[str, ...]] = {
    "gres": ("--gres=gpu:1",),
    "gpus-per-node": ("--gpus-per-node=1",),
}


@dataclass(frozen=True)
class ProbeResults:
    """Results of the probes."""

    findings: tuple[Finding, ...]
    habits: SiteConventions
    gpu_request_style: GpuRequestStyle | None = None
    """The only accepted way to request a GPU; None if both or neither are accepted."""


def probe_options(site: Site, environ: Mapping[str, str]) -> ProbeResults:
    """Test short jobs with and without individual options."""
    plain = _partition_options(site.default_partition, site)
    on_gpus = _partition_options(_with_gpus(site), site)
    tries = {
        "plain": (*plain, *_TIME, *_MEMORY),
        "no memory": (*plain, *_TIME),
        "no time": (*plain, *_MEMORY),
        "neither": plain,
        **{way: (*on_gpus, *_TIME, *option) for way, option in _GPU.items()},
        **{f"{way} with memory": (*on_gpus, *_TIME, *_MEMORY, *option) for way, option in _GPU.items()},
    }
    commands = [("sbatch", "--test-only", *options, "--wrap=true") for options in tries.values()]
    answers = dict(zip(tries, run_slurm_parallel(commands, environ, timeout_s=_LIMIT_S), strict=True))
    refusals = {name: _reason(one) for name, one in answers.items() if isinstance(one, SchedulerError)}
    return _judge(refusals, site)


def _reason(error: SchedulerError) -> str:
    """Return the reason for a rejection; only the plugin's message if there is one."""
    parts = str(error).removeprefix("sbatch failed: ").split("; ")
    return "; ".join([part for part in parts if "Unspecified error" not in part] or parts)


def _partition_options(partition: Partition | None, site: Site) -> tuple[str, ...]:
    if partition is None or partition == site.default_partition:
        return ()
    return (f"--partition={partition.name}",)


def _with_gpus(site: Site) -> Partition | None:
    """Return the partition for GPU probes: the default partition if it has GPUs."""
    places = [
        one for one in site.partitions if any(group.num_gpus for group in one.groups) and one.state == "UP"
    ]
    return next((one for one in places if one.default), next(iter(places), None))


def _judge(refusals: Mapping[str, str], site: Site) -> ProbeResults:
    if {"plain", "no memory", "no time", "neither"} <= refusals.keys():
        finding = Finding(
            _TOPIC,
            "a plain job",
            f"refused: {refusals['no memory']}",
            "problem",
            "Set the options that this site requires, such as --account, in hpctrain.yaml.",
        )
        return ProbeResults((finding,), site.habits)
    findings = [Finding(_TOPIC, "a plain job", "accepted")]
    needs_memory = "no memory" in refusals and "plain" not in refusals
    refuses_memory = "plain" in refusals and "no memory" not in refusals
    # If one option is always rejected, test the other option without it.
    without_time = "neither" if refuses_memory else "no time"
    needs_time = without_time in refusals
    findings += [_memory(refusals, refuses_memory, needs_memory, site)]
    findings += [
        Finding(_TOPIC, "time limit", f"required: {refusals[without_time]}", "note", "Always set --time.")
        if needs_time
        else Finding(_TOPIC, "time limit", "optional")
    ]
    shares = site.slurm is None or site.slurm.hands_out_memory
    option: MemoryOptionSupport = "refused" if refuses_memory else "accepted" if shares else "ignored"
    habits = SiteConventions(
        memory_option=option,
        needs_time=needs_time,
        needs_memory=needs_memory,
        requeue=site.habits.requeue,
        containers=site.habits.containers,
    )
    more, way = _gpus(refusals, site, needs_memory=needs_memory)
    return ProbeResults((*findings, *more), habits, way)


def _memory(refusals: Mapping[str, str], refuses: bool, needs: bool, site: Site) -> Finding:
    slurm = site.slurm
    if refuses:
        return Finding(
            _TOPIC, "memory", f"--mem is rejected: {refusals['plain']}", "note", "Do not use --mem."
        )
    if needs:
        return Finding(_TOPIC, "memory", f"required: {refusals['no memory']}", "note", "Always set --mem.")
    if slurm is not None and not slurm.hands_out_memory:
        return Finding(_TOPIC, "memory", "--mem only selects nodes with enough memory; usage is not limited")
    if slurm is not None and slurm.default_memory_mib is None:
        return Finding(
            _TOPIC,
            "memory",
            "a job without --mem requests all memory on its nodes",
            "note",
            "If jobs share nodes, always set --mem. Otherwise, each job waits for empty nodes.",
        )
    if slurm is None:
        return Finding(_TOPIC, "memory", "--mem is accepted")
    whose = "node" if slurm.def_mem_per_node_mib else "CPU"
    return Finding(
        _TOPIC, "memory", f"a job without --mem receives {slurm.default_memory_mib} MiB per {whose}"
    )


def _gpus(
    refusals: Mapping[str, str], site: Site, *, needs_memory: bool
) -> tuple[list[Finding], GpuRequestStyle | None]:
    if _with_gpus(site) is None:
        return [Finding(_TOPIC, "GPUs", "none in any partition")], None
    suffix = " with memory" if needs_memory else ""
    ways = [way for way in _GPU if f"{way}{suffix}" not in refusals]
    if not ways:
        words = f"refused: {refusals[f'gres{suffix}']}"
        mend = "Set the options that GPU jobs require at this site, such as --account or --partition."
        return [Finding(_TOPIC, "GPUs", words, "note", mend)], None
    words = " or ".join(f"--{way}" for way in ways)
    if len(ways) == len(_GPU):
        return [Finding(_TOPIC, "GPUs", f"can be requested with {words}")], None
    other = next(way for way in _GPU if way not in ways)
    mend = (
        ""
        if ways[0] == "gres"
        else "Set `gpu_request_style: gpus-per-node` in hpctrain.yaml or in the site profile."
    )
    finding = Finding(
        _TOPIC,
        "GPUs",
        f"can be requested with {words}; --{other} is rejected: {refusals[f'{other}{suffix}']}",
        "note" if mend else "ok",
        mend,
    )
    return [finding], ways[0]
