"""List the options of sbatch, with their use in hpctrain, and check the user's options of srun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from hpctrain.errors import SpecError


class SbatchOption(NamedTuple):
    name: str
    """Long name without dashes."""
    short: str
    has_variable: bool
    """True if sbatch also reads a variable (sbatch(1), section INPUT ENVIRONMENT VARIABLES)."""
    use: Literal["passed", "translated", "batch", "other", "salloc"]
    """Passed on unchanged; set by an option of hpctrain; set by hpctrain itself except in a batch script; of
    the command, or not possible; or accepted by older versions and salloc only."""
    value: Literal["none", "optional", "required"]


#: The options of sbatch 20.11 to 26.05 by use and value: NAME[/SHORT NAME][$ if there is a variable].
_TABLE = {
    "passed required": """
        account/A$ acctg-freq$ batch$ bb$ bbf begin/b cluster-constraint$ comment constraint/C$ container$
        container-id$ container-type$ context core-spec/S$ cores-per-socket cpu-freq$ deadline delay-boot$
        dependency/d distribution/m$ exclude/x extra extra-node-info/B gid gpu-bind$ gpu-freq$ gres$
        gres-flags$ hint$ kill-on-invalid-dep licenses/L mail-type mail-user mcs-label mem$ mem-bind$
        mem-per-cpu$ mem-per-gpu$ mem-update mincpus network$ nodelist/w partition/p$ power$ prefer priority
        qos/q$ reservation$ resources segment$ sockets-per-node switches$ thread-spec$ threads-per-core$
        time-min tmp tres-bind$ tres-per-job tres-per-task$ uid wait-all-nodes$ wckey$""",
    "passed optional": "exclusive$ get-user-env$ nice propagate resv-ports",
    "passed none": """
        consolidate-segments$ contiguous hold/H ignore-pbs$ overcommit/O$ oversubscribe/s reboot
        spread-job$ spread-segments$ stepmgr use-min-nodes$""",
    "translated required": """
        array/a cpus-per-task/c gpus-per-node gpus-per-task job-name/J$ nodes/N ntasks-per-node time/t$""",
    "batch required": """
        chdir/D cpus-per-gpu error/e export export-file gpus/G gpus-per-socket input/i nodefile/F ntasks/n
        ntasks-per-core ntasks-per-gpu ntasks-per-socket ntasks-per-tres open-mode output/o signal""",
    "batch optional": "no-kill/k oom-kill-step requeue",
    "other required": "clusters/M profile$ tasks-per-node wrap",
    "other none": """
        external help/h no-requeue parsable quiet/Q test-only usage/u verbose/v version/V wait/W""",
    "salloc required": "bell immediate",
    "salloc optional": "x11",
    "salloc none": "no-bell",
}


def _options() -> Iterator[SbatchOption]:
    for kind, names in _TABLE.items():
        use, value = kind.split()
        for text in names.split():
            name, _, short = text.removesuffix("$").partition("/")
            yield SbatchOption(name, short, text.endswith("$"), use, value)  # type: ignore[arg-type]


#: All options of sbatch and older versions, by name.
OPTIONS = {option.name: option for option in sorted(_options())}


def _python_names(*uses: str) -> dict[str, str]:
    return {name.replace("-", "_"): name for name, option in OPTIONS.items() if option.use in uses}


#: Short names, except those that `hpctrain submit` uses differently.
SHORT_NAMES = {
    option.short: name for name, option in OPTIONS.items() if option.short not in ("", *"BFhkMmOQSsuVv")
}
#: The options that hpctrain only passes on, by their names in Python.
SBATCH_OPTIONS = _python_names("passed", "salloc")
#: The options for a batch script only: for other programs, hpctrain sets them.
BATCH_OPTIONS = _python_names("batch")
#: hpctrain's names of the other options that sbatch also has.
BATCH_KEYS = {name: key for key, name in _python_names("translated").items()} | {"job-name": "name"}
#: Options whose value may be omitted; the others of these accept no value.
SBATCH_OPTIONAL_VALUES = frozenset({"exclusive", "x11"})
SBATCH_FLAGS = SBATCH_OPTIONAL_VALUES | {
    name for name in SBATCH_OPTIONS.values() if OPTIONS[name].value == "none"
}


#: Short names of srun's options; some have another meaning in sbatch.
_SRUN_SHORT_NAMES = SHORT_NAMES | {
    "a": "attach", "h": "help", "I": "immediate", "K": "kill-on-bad-exit", "k": "no-kill", "l": "label",
    "m": "distribution", "r": "relative", "V": "version", "Z": "no-allocate",
}  # fmt: skip

#: Options of srun(1) that change what the supervisor relies on.
_RESERVED = (
    *("attach", "begin", "chdir", "cpus-per-task", "disable-status", "error", "exact", "exclude"),
    *("exclusive", "export", "export-file", "get-user-env", "help", "immediate", "input", "job-name"),
    *("jobid", "kill-on-bad-exit", "label", "mpi", "multi-prog", "no-allocate", "no-kill", "nodefile"),
    *("nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "overlap", "pty"),
    *("quit-on-interrupt", "relative", "signal", "tasks-per-node", "test-only", "time", "time-min"),
    *("usage", "version", "wait"),
)


def check_srun_args(srun_args: Sequence[str]) -> None:
    """Check that the user's options of srun do not change what the supervisor relies on."""
    for option in srun_args:
        name, _, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or not name or any(map(str.isspace, name)):
            raise SpecError(
                f"{option!r} (--srun-arg) is not an option of srun. Write one option with its value, such as "
                "--srun-arg=--cpu-bind=cores."
            )
        if not option.startswith("--"):
            value = name[1:]
            name = _SRUN_SHORT_NAMES.get(name[0], name[0])
        # srun completes unique beginnings of names.
        if reserved := next((key for key in _RESERVED if key.startswith(name)), None):
            raise SpecError(
                f"--srun-arg cannot set --{reserved}, which hpctrain sets itself or which would prevent the "
                "ranks from starting. Use the options of `hpctrain submit`."
            )
        if name == "distribution" and value.partition(":")[0] not in ("block", "*"):
            raise SpecError(
                f"{option!r} (--srun-arg) changes the order of the ranks, but the ranks of a node must have "
                "consecutive numbers. Use block, such as --distribution=block:cyclic."
            )
