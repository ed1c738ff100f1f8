"""Check options that are passed to sbatch, and explain those of sbatch and other launchers that are not."""

from __future__ import annotations

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import NO, YES
from hpctrain.jobs.options.table import SbatchOptions, all_options, sbatch_options
from hpctrain.text import suggest

#: Short names of sbatch's options. Those that `submit` uses differently are missing.
SHORT_NAMES = {
    "A": "account", "a": "array", "b": "begin", "C": "constraint", "c": "cpus-per-task", "D": "chdir",
    "d": "dependency", "e": "error", "G": "gpus", "H": "hold", "i": "input", "J": "job-name", "L": "licenses",
    "N": "nodes", "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "t": "time", "W": "wait",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip
#: Options of sbatch, torchrun and other launchers, by the sentence that names their replacement.
_REPLACEMENTS = {
    "A job runs in its run folder. Choose that folder with --run-dir": "chdir",
    "Choose the cluster with the environment variable SLURM_CLUSTERS": "clusters",
    "Choose trackers in the script: Trainer(loggers='mlflow')": "mlflow",
    "Choose trackers in the script: Trainer(loggers='wandb')": "wandb",
    "hpctrain always appends to logs": "open-mode",
    "hpctrain assigns the ranks": "node-rank",
    "hpctrain chooses the rendezvous address": "master-addr",
    "hpctrain chooses the rendezvous id": "rdzv-id",
    "hpctrain chooses the rendezvous port": "master-port",
    "Logs are in the run folder. Choose that folder with --run-dir": "error output",
    "Pass the script as an argument to hpctrain submit": "wrap",
    "Put --on directly after the command: hpctrain submit --on CLUSTER": "on",
    "Ranks have no standard input. Pass arguments to the script instead": "input",
    "Slurm chooses the GPUs. Use --gpus-per-node": "gpu-ids",
    "The supervisor already handles lost nodes": "no-kill",
    "The supervisor detects crashes immediately. For hangs, use --hang-timeout": "monitor-interval",
    "Use --backend local": "standalone",
    "Use --container-image": "image",
    "Use --cpus-per-task": "cpus-per-gpu",
    "Use --dry-run": "test-only",
    "Use --env": "export export-file",
    "Use --follow, or hpctrain wait": "wait",
    "Use --gpus-per-node": "devices gpu gpus gpus-per-socket num-gpus",
    "Use --gpus-per-node: a GPU is not shared by several ranks": "ntasks-per-gpu",
    "Use --json": "parsable",
    "Use --max-failures": "max-restarts",
    "Use --name": "job-name",
    "Use --nodelist with the path of the file, such as --nodelist ./nodes.txt": "nodefile",
    "Use --nodes": "nnodes num-nodes",
    "Use --nodes with --gpus-per-node, or with --ntasks-per-node for a run on CPUs": "num-processes",
    "Use --ntasks-per-node": "nproc-per-node ntasks ntasks-per-core ntasks-per-socket tasks-per-node",
    "Use --resume-mode": "requeue",
    "Use --resume-mode successor to continue without requeues": "no-requeue",
    "Use --stop-before-limit": "signal",
    "Use --time": "walltime",
    "Use -m, as with python -m": "module-name",
}
_SENTENCES = {name: sentence for sentence, names in _REPLACEMENTS.items() for name in names.split()}


def find_replacement(name: str) -> str:
    """Return a sentence that names the replacement for an option, without a full stop; empty if unknown.

    Args:
        name: the option, with or without leading dashes, with `-` or `_`.
    """
    key = name.lstrip("-").replace("_", "-").partition("=")[0]
    if name[:1] == "-" != name[1:2]:
        key = SHORT_NAMES.get(key, key)
    if sentence := _SENTENCES.get(key):
        return sentence
    option = all_options().get(key.replace("-", "_"))
    if option is None:
        return ""
    return f"Use {option.flag}" if option.about.on_command_line else f"Use --set {option.name}=VALUE"


def parse_sbatch_option(name: str, value: object, label: str) -> tuple[str, str | None]:
    """Return the key and the value of an option of sbatch. A flag has an empty value, or None if it is off.

    Args:
        name: the long name of the option, with `-` or `_`.
        value: the value; empty for an option without a value.
        label: name of the option in errors.

    Raises:
        SpecError: sbatch has no such option, it does not accept the value, or hpctrain sets it.
    """
    name = name.replace("_", "-")
    is_known = name in sbatch_options().values() or name == "profile"
    if not is_known and (replacement := find_replacement(name)):
        raise SpecError(f"{label} cannot be set. {replacement}.")
    if not is_known:
        hint = suggest(name, sbatch_options().values(), otherwise="See the long options in `man sbatch`.")
        raise SpecError(f"sbatch has no option {name!r} ({label}). {hint}")
    kind = SbatchOptions.__annotations__.get(name.replace("-", "_"))
    if kind is bool or kind == bool | str:
        if value is True or str(value).lower() in ("", *YES):
            return f"sbatch.{name}", ""
        if value is False or str(value).lower() in NO:
            return f"sbatch.{name}", None
        if kind is bool:
            raise SpecError(
                f"{label} is {value!r}, but this flag of sbatch accepts no value. Remove the value, or the "
                "option."
            )
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        value = ",".join(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SpecError(f"{label} is {value!r}, but must be a string.")
    return f"sbatch.{name}", str(value)
