"""Options of sbatch and other launchers: those that `--sbatch` accepts, and replacements for the others."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import SpecError
from hpctrain.jobs.options.table import all_options
from hpctrain.text import suggest

#: Directives that hpctrain sets itself, and their replacements.
_OURS = {
    "array": "Use --array",
    "chdir": "A job runs in its run folder. Choose that folder with --run-dir",
    "clusters": "Choose the cluster with the environment variable SLURM_CLUSTERS",
    "cpus-per-gpu": "Use --cpus-per-task",
    "cpus-per-task": "Use --cpus-per-task",
    "error": "Logs are in the run folder. Choose that folder with --run-dir",
    "export": "Use --env",
    "export-file": "Use --env",
    "gpus": "Use --gpus-per-node",
    "gpus-per-node": "Use --gpus-per-node",
    "gpus-per-socket": "Use --gpus-per-node",
    "gpus-per-task": "Use --gpus-per-task",
    "input": "Ranks have no standard input. Pass arguments to the script instead",
    "job-name": "Use --name",
    "nodefile": "Use --nodelist with the path of the file, such as --nodelist ./nodes.txt",
    "no-kill": "The supervisor already handles lost nodes",
    "no-requeue": "Use --resume-mode successor to continue without requeues",
    "nodes": "Use --nodes",
    "ntasks": "Use --ntasks-per-node",
    "ntasks-per-core": "Use --ntasks-per-node",
    "ntasks-per-gpu": "Use --gpus-per-node: a GPU is not shared by several ranks",
    "ntasks-per-node": "Use --ntasks-per-node",
    "ntasks-per-socket": "Use --ntasks-per-node",
    "open-mode": "hpctrain always appends to logs",
    "output": "Logs are in the run folder. Choose that folder with --run-dir",
    "parsable": "Use --json",
    "requeue": "Use --resume-mode",
    "signal": "Use --stop-before-limit",
    "tasks-per-node": "Use --ntasks-per-node",
    "test-only": "Use --dry-run",
    "time": "Use --time",
    "wait": "Use --follow, or hpctrain wait",
    "wrap": "Pass the script as an argument to hpctrain submit",
}

# All other long options of sbatch(1) that a script may contain, from Slurm 20.11 to 25.05.
_WITH_VALUE = """
    acctg-freq batch bb bbf bell cluster-constraint consolidate-segments container container-id core-spec
    cores-per-socket cpu-freq deadline delay-boot distribution extra extra-node-info get-user-env gid
    gpu-bind gpu-freq gres-flags hint immediate kill-on-invalid-dep mcs-label mem-bind mincpus network
    power prefer priority profile propagate resv-ports segment sockets-per-node thread-spec
    threads-per-core time-min tmp tres-bind tres-per-job tres-per-task uid wait-all-nodes wckey x11
"""
_FLAGS = """
    contiguous hold ignore-pbs no-bell overcommit oversubscribe reboot spread-job stepmgr use-min-nodes
"""


#: Short options of sbatch whose long form is not an option of `submit`.
_SHORT = {
    "D": "chdir", "e": "error", "G": "gpus", "H": "hold", "i": "input", "n": "ntasks", "o": "output",
    "W": "wait",
}  # fmt: skip
#: Options of torchrun, accelerate and other launchers.
_FOREIGN_OPTIONS = {
    "devices": "Use --gpus-per-node",
    "gpu": "Use --gpus-per-node",
    "gpu-ids": "Slurm chooses the GPUs. Use --gpus-per-node",
    "module-name": "Use -m, as with python -m",
    "image": "Use --container-image",
    "master-addr": "hpctrain chooses the rendezvous address",
    "master-port": "hpctrain chooses the rendezvous port",
    "max-restarts": "Use --max-failures",
    "monitor-interval": "The supervisor detects crashes immediately. For hangs, use --hang-timeout",
    "nnodes": "Use --nodes",
    "node-rank": "hpctrain assigns the ranks",
    "on": "Put --on directly after the command: hpctrain submit --on CLUSTER",
    "nproc-per-node": "Use --ntasks-per-node",
    "num-gpus": "Use --gpus-per-node",
    "num-nodes": "Use --nodes",
    "num-processes": "Use --nodes with --gpus-per-node, or with --ntasks-per-node for a run on CPUs",
    "rdzv-id": "hpctrain chooses the rendezvous id",
    "standalone": "Use --backend local",
    "mlflow": "Choose trackers in the script: Trainer(loggers='mlflow')",
    "walltime": "Use --time",
    "wandb": "Choose trackers in the script: Trainer(loggers='wandb')",
}


def explain_foreign(name: str) -> str:
    """Return a sentence that names the replacement for an option of another launcher; empty if unknown.

    Args:
        name: the option, with or without leading dashes, with `-` or `_`.
    """
    key = name.lstrip("-").replace("_", "-").partition("=")[0]
    key = _SHORT.get(key, key)
    if sentence := _OURS.get(key) or _FOREIGN_OPTIONS.get(key):
        return f"{sentence}."
    if key in _FLAGS.split():
        return f"Use --sbatch {key}."
    return f"Use --sbatch {key}=VALUE." if key in _WITH_VALUE.split() else ""


def check_extra_directives(given: Mapping[str, str]) -> dict[str, str]:
    """Check the values of `--sbatch` and return them as directives; a flag gets an empty value.

    Raises:
        SpecError: sbatch has no such option, or hpctrain provides this option.
    """
    return {key: _checked(key, value) for key, value in given.items()}


def _checked(key: str, value: str) -> str:
    if key in _OURS:
        raise SpecError(f"--sbatch cannot set {key}. {_OURS[key]}.")
    if key in (named := _named()):
        raise SpecError(f"Use --{key} instead of --sbatch {key}.")
    if key in _FLAGS.split():
        if value not in ("", "true", "yes"):
            raise SpecError(
                f"--sbatch {key} is {value!r}, but this sbatch flag accepts no value. "
                f"Use --sbatch {key} without a value, or remove the option."
            )
        return ""
    if key not in _WITH_VALUE.split():
        known = (*_WITH_VALUE.split(), *_FLAGS.split(), *_OURS, *named)
        hint = suggest(key, known, otherwise="See the long options in `man sbatch`.")
        raise SpecError(f"sbatch has no option {key!r} (--sbatch). {hint}")
    return value


def replacement_option(name: str) -> str:
    """Return the replacement for a directive that hpctrain sets; empty if it does not set it."""
    return _OURS.get(name, "")


def _named() -> set[str]:
    """Return the sbatch options that hpctrain accepts under the same name."""
    return {option.flag[2:] for option in all_options().values() if option.about.directive}
