"""List the options of sbatch and srun, and read and write `#SBATCH` lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpctrain.errors import SpecError
from hpctrain.slurm.batch_header import FLAGS, HET_BORDER, SHORT_NAMES, has_value

#: Options of sbatch(1) that hpctrain only passes on, from Slurm 20.11 to 25.05.
_NAMES = """
account acctg-freq batch bb bbf begin bell cluster-constraint comment consolidate-segments constraint
container container-id contiguous core-spec cores-per-socket cpu-freq deadline delay-boot dependency
distribution exclude exclusive extra extra-node-info get-user-env gid gpu-bind gpu-freq gres gres-flags hint
hold ignore-pbs immediate kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nice no-bell nodelist overcommit oversubscribe partition power prefer priority
propagate qos reboot reservation resv-ports segment sockets-per-node spread-job stepmgr switches thread-spec
threads-per-core time-min tmp tres-bind tres-per-job tres-per-task uid use-min-nodes wait-all-nodes wckey x11
"""
#: The long names by their names in Python.
SBATCH_OPTIONS = {name.replace("-", "_"): name for name in _NAMES.split()}
#: Options whose value may be omitted; the others of these accept no value.
SBATCH_OPTIONAL_VALUES = frozenset({"exclusive", "x11"})
SBATCH_FLAGS = SBATCH_OPTIONAL_VALUES | {"no-bell"} | FLAGS.intersection(SBATCH_OPTIONS.values())
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

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)


def directive_lines(directives: Mapping[str, str], origins: Mapping[str, str] | None = None) -> list[str]:
    """Format the directives as `#SBATCH` lines of a batch script, with comments on their origins."""
    comments = {key: f"  # {origin}" for key, origin in (origins or {}).items()}
    return [
        f"#SBATCH --{key}{f'={quote_directive(value)}' if value or has_value(key) else ''}"
        f"{comments.get(key, '')}"
        for key, value in directives.items()
    ]


def quote_directive(value: str) -> str:
    r"""Quote a value so that sbatch reads it back unchanged from an `#SBATCH` line.

    The rules, from `_get_argument` in Slurm's src/sbatch/opt.c: quotes group; a backslash escapes the next
    character, also inside quotes, but not a space outside quotes; an unquoted # starts a comment; newlines
    are not supported. Nothing is expanded.
    """
    if _PLAIN.fullmatch(value) and not HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + HET_BORDER.sub(r"\1\\", escaped) + '"'


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
