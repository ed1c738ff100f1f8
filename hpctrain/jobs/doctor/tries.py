"""What the site makes of a job's options, tried with `sbatch --test-only`, which submits nothing.

A site may refuse or demand an option in a plugin of its own, of which Slurm's configuration tells only the
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.errors import SchedulerError
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.site.facts import Habits, MemoryOption, Partition, Site
from hpctrain.jobs.slurm_command import run_side_by_side
from hpctrain.jobs.spec import GpuDirective

_TOPIC = "Jobs"
_LIMIT_S = 20.0

_TIME = ("--time=5",)
_MEMORY = ("--mem=100M",)
#: Ways to ask for a GPU, the one first that is taken where both work.
_GPU: Mapping[GpuDirective, tuple[str, ...]] = {
    "gres": ("--gres=gpu:1",),
    "gpus-per-node": ("--gpus-per-node=1",),
}


@dataclass(frozen=True)
class Tried:
    """What became of the tries."""

    findings: tuple[Finding, ...]
    habits: Habits
    gpu_directive: GpuDirective | None = None
    """The only way to ask for a GPU that works here; None where either does, or none."""


def try_options(site: Site, environ: Mapping[str, str]) -> Tried:
    """Ask the site for jobs of some minutes with one option more, and with one less."""
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
    answers = dict(zip(tries, run_side_by_side(commands, environ, timeout_s=_LIMIT_S), strict=True))
    refusals = {name: _reason(one) for name, one in answers.items() if isinstance(one, SchedulerError)}
    return _judge(refusals, site)


def _reason(error: SchedulerError) -> str:
    """Why a job was refused; a plugin's own words, where it says some."""
    parts = str(error).removeprefix("sbatch says: ").split("; ")
    return "; ".join([part for part in parts if "Unspecified error" not in part] or parts)


def _partition_options(partition: Partition | None, site: Site) -> tuple[str, ...]:
    if partition is None or partition == site.default_partition:
        return ()
    return (f"--partition={partition.name}",)


def _with_gpus(site: Site) -> Partition | None:
    """The partition to ask for a GPU: the default one, if it has any."""
    places = [
        one for one in site.partitions if any(group.num_gpus for group in one.groups) and one.state == "UP"
    ]
    return next((one for one in places if one.default), next(iter(places), None))


def _judge(refusals: Mapping[str, str], site: Site) -> Tried:
    if {"plain", "no memory", "no time", "neither"} <= refusals.keys():
        finding = Finding(
            _TOPIC,
            "a plain job",
            f"refused: {refusals['no memory']}",
            "problem",
            "Find out what the site wants, such as --account or --partition, and put it into hpctrain.yaml.",
        )
        return Tried((finding,), site.habits)
    findings = [Finding(_TOPIC, "a plain job", "accepted")]
    needs_memory = "no memory" in refusals and "plain" not in refusals
    refuses_memory = "plain" in refusals and "no memory" not in refusals
    # Without the option that is refused anyway, only the other one can be to blame.
    without_time = "neither" if refuses_memory else "no time"
    needs_time = without_time in refusals
    findings += [_memory(refusals, refuses_memory, needs_memory, site)]
    findings += [
        Finding(_TOPIC, "time limit", f"demanded: {refusals[without_time]}", "note", "Give --time.")
        if needs_time
        else Finding(_TOPIC, "time limit", "a job may leave it out")
    ]
    shares = site.slurm is None or site.slurm.hands_out_memory
    option: MemoryOption = "refused" if refuses_memory else "accepted" if shares else "ignored"
    habits = Habits(
        memory_option=option,
        needs_time=needs_time,
        needs_memory=needs_memory,
        requeue=site.habits.requeue,
        containers=site.habits.containers,
    )
    more, way = _gpus(refusals, site, needs_memory=needs_memory)
    return Tried((*findings, *more), habits, way)


def _memory(refusals: Mapping[str, str], refuses: bool, needs: bool, site: Site) -> Finding:
    slurm = site.slurm
    if refuses:
        return Finding(_TOPIC, "memory", f"--mem is refused: {refusals['plain']}", "note", "Give no --mem.")
    if needs:
        return Finding(_TOPIC, "memory", f"demanded: {refusals['no memory']}", "note", "Give --mem.")
    if slurm is not None and not slurm.hands_out_memory:
        return Finding(_TOPIC, "memory", "--mem chooses nodes that have it, and bounds nothing")
    if slurm is not None and slurm.default_memory_mib is None:
        return Finding(
            _TOPIC,
            "memory",
            "a job without --mem gets all memory of its nodes",
            "note",
            "Where jobs share nodes, give --mem, or yours waits for empty ones.",
        )
    if slurm is None:
        return Finding(_TOPIC, "memory", "--mem is accepted")
    whose = "node" if slurm.def_mem_per_node_mib else "CPU"
    return Finding(
        _TOPIC, "memory", f"a job without --mem gets {slurm.default_memory_mib} MiB for each {whose}"
    )


def _gpus(
    refusals: Mapping[str, str], site: Site, *, needs_memory: bool
) -> tuple[list[Finding], GpuDirective | None]:
    if _with_gpus(site) is None:
        return [Finding(_TOPIC, "GPUs", "no partition has any")], None
    suffix = " with memory" if needs_memory else ""
    ways = [way for way in _GPU if f"{way}{suffix}" not in refusals]
    if not ways:
        words = f"refused: {refusals[f'gres{suffix}']}"
        mend = "Runs on GPUs need what the site wants, such as --account or --partition."
        return [Finding(_TOPIC, "GPUs", words, "note", mend)], None
    words = " and ".join(f"--{way}" for way in ways)
    if len(ways) == len(_GPU):
        return [Finding(_TOPIC, "GPUs", f"asked for by {words} alike")], None
    other = next(way for way in _GPU if way not in ways)
    mend = (
        ""
        if ways[0] == "gres"
        else "Put `gpu_directive: gpus-per-node` into hpctrain.yaml or the site's profile."
    )
    finding = Finding(
        _TOPIC,
        "GPUs",
        f"asked for by {words}; --{other} is refused: {refusals[f'{other}{suffix}']}",
        "note" if mend else "ok",
        mend,
    )
    return [finding], ways[0]
