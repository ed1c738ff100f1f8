"""The `#SBATCH` lines of a job: which there are, which are ours, and how sbatch reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpctrain.errors import SpecError
from hpctrain.jobs.duration import format_duration
from hpctrain.jobs.spec import JobSpec

#: Directives that the run itself rests on, and what to use instead of giving them by `--sbatch`.
_OURS = {
    "array": "Job arrays are not supported yet: submit one run for each element",
    "chdir": "A job runs in its run folder: choose it with --run-dir",
    "clusters": "Choose the cluster with the variable SLURM_CLUSTERS",
    "cpus-per-task": "Use --cpus-per-task",
    "error": "Logs lie in the run folder: choose it with --run-dir",
    "export": "Give variables with --env",
    "export-file": "Give variables with --env",
    "gpus": "Use --gpus-per-node",
    "gpus-per-node": "Use --gpus-per-node",
    "gpus-per-socket": "Use --gpus-per-node",
    "gpus-per-task": "Use --gpus-per-node: each rank has one GPU",
    "gres": "Use --gpus-per-node",
    "input": "Give the script arguments instead: ranks have no standard input",
    "job-name": "Use --name",
    "no-kill": "What happens when a node dies is up to the supervisor",
    "no-requeue": "A run has to be requeued to survive a preemption",
    "nodes": "Use --nodes",
    "ntasks": "Use --tasks-per-node",
    "ntasks-per-core": "Use --tasks-per-node",
    "ntasks-per-gpu": "Use --gpus-per-node: each rank has one GPU",
    "ntasks-per-node": "Use --tasks-per-node",
    "ntasks-per-socket": "Use --tasks-per-node",
    "open-mode": "Logs are always appended to",
    "output": "Logs lie in the run folder: choose it with --run-dir",
    "parsable": "Use --json",
    "requeue": "Every run is requeued already",
    "signal": "Use --signal-lead",
    "tasks-per-node": "Use --tasks-per-node",
    "test-only": "Use --dry-run",
    "time": "Use --time",
    "wait": "Use --follow, or hpctrain wait",
    "wrap": "Give the script as an argument of hpctrain submit",
}

# The other long options of sbatch(1), of Slurm 20.11 to 25.05, that stand in a script.
_NAMES = """
    account acctg-freq batch bb bbf begin bell cluster-constraint comment constraint consolidate-segments
    container container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot
    dependency distribution exclude exclusive extra extra-node-info get-user-env gid gpu-bind gpu-freq
    gres-flags hint hold ignore-pbs immediate kill-on-invalid-dep licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-bell nodefile nodelist overcommit oversubscribe
    partition power prefer priority profile propagate qos reboot reservation resv-ports segment
    sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp tres-bind
    tres-per-job tres-per-task uid use-min-nodes wait-all-nodes wckey x11
"""
_THEIRS = frozenset(_NAMES.split())

# Words inside which sbatch looks for the border between the parts of a heterogeneous job, wherever
# they stand in an #SBATCH line.
_HET_BORDER = re.compile(r"(pack|het)(?=job)", re.IGNORECASE)

_PLAIN = re.compile(r"[A-Za-z0-9_./:,@%+=~^*-]*", re.ASCII)


def check_directive(key: str) -> None:
    """See to it that a directive is one of sbatch's, and not one that the run itself sets.

    Raises:
        SpecError: the directive is reserved, or unknown.
    """
    if key in _OURS:
        raise SpecError(f"--sbatch {key} is set by hpctrain itself. {_OURS[key]}.")
    if key not in _THEIRS:
        from difflib import get_close_matches

        close = get_close_matches(key, (*_THEIRS, *_OURS), 1)
        hint = f"Did you mean {close[0]!r}?" if close else "See the long options in `man sbatch`."
        raise SpecError(f"sbatch has no option {key!r} (--sbatch). {hint}")


def directives_of(spec: JobSpec) -> dict[str, str]:
    """All options of the job by their long names, in the order of the script; a flag has no value."""
    ours = {
        "job-name": spec.name,
        "nodes": str(spec.nodes),
        "ntasks-per-node": str(spec.tasks_per_node),
    }
    if spec.gpus_per_node:
        ours["gres"] = f"gpu:{spec.gpus_per_node}"
    if spec.cpus_per_task is not None:
        ours["cpus-per-task"] = str(spec.cpus_per_task)
    if spec.time_limit_s is not None:
        ours["time"] = format_duration(spec.time_limit_s)
    ours |= {
        "chdir": spec.run_dir,
        "output": _file_name(f"{spec.run_dir}/logs/slurm.log"),
        "open-mode": "append",
        "requeue": "",
        "signal": f"USR2@{spec.signal_lead_s}",
        "export": "ALL",
    }
    return ours | spec.directives


def directive_lines(directives: Mapping[str, str]) -> list[str]:
    """The directives as `#SBATCH` lines of a batch script."""
    return [
        f"#SBATCH --{key}={quote_directive(value)}" if value else f"#SBATCH --{key}"
        for key, value in directives.items()
    ]


def _file_name(path: str) -> str:
    r"""The path as a file name pattern that stands for just this path.

    A backslash anywhere in a pattern switches its replacement symbols off, and takes the character
    after it as it is (sbatch(1), section FILENAME PATTERN).
    """
    return re.sub(r"[\\%]", r"\\\g<0>", path)


def quote_directive(value: str) -> str:
    r"""Quote a value so that sbatch reads it back unchanged from an `#SBATCH` line.

    The rules, from `_get_argument` in Slurm's src/sbatch/opt.c: quotes group; a backslash takes the
    next character as it is, inside quotes too, but cannot protect a blank outside of them; an
    unquoted # starts a comment; there is no way to write a newline. Nothing is expanded.
    """
    if _PLAIN.fullmatch(value) and not _HET_BORDER.search(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + _HET_BORDER.sub(r"\1\\", escaped) + '"'
