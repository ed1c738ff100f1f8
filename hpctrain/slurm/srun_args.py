"""Check the user's options of srun."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.errors import SpecError
from hpctrain.slurm.sbatch_options import SHORT_NAMES

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
