"""What `--sbatch` may say: the options of sbatch that have none of their own here, and no part in the run."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import SpecError
from hpctrain.jobs.options import options

#: Directives that the run itself rests on, and what to use instead.
_OURS = {
    "array": "Use --array",
    "chdir": "A job runs in its run folder: choose it with --run-dir",
    "clusters": "Choose the cluster with the variable SLURM_CLUSTERS",
    "cpus-per-gpu": "Use --cpus-per-task: each rank has one GPU",
    "cpus-per-task": "Use --cpus-per-task",
    "error": "Logs lie in the run folder: choose it with --run-dir",
    "export": "Give variables with --env",
    "export-file": "Give variables with --env",
    "gpus": "Use --gpus-per-node",
    "gpus-per-node": "Use --gpus-per-node",
    "gpus-per-socket": "Use --gpus-per-node",
    "gpus-per-task": "Use --gpus-per-node: each rank has one GPU",
    "input": "Give the script arguments instead: ranks have no standard input",
    "job-name": "Use --name",
    "no-kill": "What happens when a node dies is up to the supervisor",
    "no-requeue": "To go on without requeues, use --continue-by successor",
    "nodes": "Use --nodes",
    "ntasks": "Use --tasks-per-node",
    "ntasks-per-core": "Use --tasks-per-node",
    "ntasks-per-gpu": "Use --gpus-per-node: each rank has one GPU",
    "ntasks-per-node": "Use --tasks-per-node",
    "ntasks-per-socket": "Use --tasks-per-node",
    "open-mode": "Logs are always appended to",
    "output": "Logs lie in the run folder: choose it with --run-dir",
    "parsable": "Use --json",
    "requeue": "Use --continue-by",
    "signal": "Use --signal-lead",
    "tasks-per-node": "Use --tasks-per-node",
    "test-only": "Use --dry-run",
    "time": "Use --time",
    "wait": "Use --follow, or hpctrain wait",
    "wrap": "Give the script as an argument of hpctrain submit",
}

# The other long options of sbatch(1), of Slurm 20.11 to 25.05, that stand in a script.
_WITH_VALUE = """
    acctg-freq batch bb bbf bell cluster-constraint consolidate-segments container container-id core-spec
    cores-per-socket cpu-freq deadline delay-boot distribution extra extra-node-info get-user-env gid
    gpu-bind gpu-freq gres-flags hint immediate kill-on-invalid-dep mcs-label mem-bind mincpus network
    nodefile power prefer priority profile propagate resv-ports segment sockets-per-node thread-spec
    threads-per-core time-min tmp tres-bind tres-per-job tres-per-task uid wait-all-nodes wckey x11
"""
_FLAGS = """
    contiguous hold ignore-pbs no-bell overcommit oversubscribe reboot spread-job stepmgr use-min-nodes
"""


def check_extra(given: Mapping[str, str]) -> dict[str, str]:
    """What `--sbatch` gave, as directives; a flag has no value, however it was set.

    Raises:
        SpecError: sbatch has no such option, or there is another way to give it.
    """
    return {key: _checked(key, value) for key, value in given.items()}


def _checked(key: str, value: str) -> str:
    if key in _OURS:
        raise SpecError(f"--sbatch {key} is set by hpctrain itself. {_OURS[key]}.")
    if key in (named := _named()):
        raise SpecError(f"--sbatch {key} has an option of its own. Use --{key}.")
    if key in _FLAGS.split():
        if value not in ("", "true", "yes"):
            raise SpecError(
                f"--sbatch {key} is {value!r}, but it is a flag of sbatch, which takes no value. "
                f"Give --sbatch {key} alone, or leave it out."
            )
        return ""
    if key not in _WITH_VALUE.split():
        from difflib import get_close_matches

        close = get_close_matches(key, [*_WITH_VALUE.split(), *_FLAGS.split(), *_OURS, *named], 1)
        hint = f"Did you mean {close[0]!r}?" if close else "See the long options in `man sbatch`."
        raise SpecError(f"sbatch has no option {key!r} (--sbatch). {hint}")
    return value


def ours(name: str) -> str:
    """What to use instead of a directive that hpctrain sets; empty where it does not set it."""
    return _OURS.get(name, "")


def _named() -> set[str]:
    """Options of sbatch that have one of the same name here."""
    return {option.flag[2:] for option in options().values() if option.about.directive}
