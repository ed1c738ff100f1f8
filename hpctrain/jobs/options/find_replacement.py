"""Name the option that replaces an option of sbatch, torchrun or another launcher."""

from __future__ import annotations

from hpctrain.jobs.options.option_table import all_options
from hpctrain.slurm.sbatch_options import SHORT_NAMES

#: Options of sbatch, torchrun and other launchers, by the sentence that names their replacement.
_REPLACEMENTS = {
    "A job runs in its run folder. Choose that folder with --run-dir": "chdir",
    "Choose the cluster with the environment variable SLURM_CLUSTERS": "clusters",
    "Choose trackers in the script: Trainer(loggers=…)": "mlflow wandb",
    "hpctrain always appends to logs": "open-mode",
    "hpctrain assigns the ranks": "node-rank",
    "hpctrain chooses the rendezvous": "master-addr master-port rdzv-id",
    "Logs are in the run folder. Choose that folder with --run-dir": "error output",
    "Pass the script as an argument to hpctrain submit": "wrap",
    "Ranks have no standard input. Pass arguments to the script instead": "input",
    "Put --on directly after the command: hpctrain submit --on CLUSTER": "on",
    "Slurm chooses the GPUs. Use --gpus-per-node": "gpu-ids",
    "The supervisor already handles lost nodes": "no-kill",
    "Use --backend local": "standalone",
    "Use --cpus-per-task": "cpus-per-gpu",
    "Use --dry-run": "test-only",
    "Use --env": "export export-file",
    "Use --follow, or hpctrain wait": "wait",
    "Use --gpus-per-node": "devices gpu gpus gpus-per-socket ntasks-per-gpu num-gpus",
    "Use --json": "parsable",
    "Use --max-failures": "max-restarts",
    "Use --name": "job-name",
    "Use --nodelist with the path of the file, such as --nodelist ./nodes.txt": "nodefile",
    "Use --nodes": "nnodes num-nodes",
    "Use --ntasks-per-node": "nproc-per-node ntasks ntasks-per-core ntasks-per-socket tasks-per-node",
    "Use --resume-mode": "requeue",
    "Use --resume-mode successor to continue without requeues": "no-requeue",
    "Use --stop-before-limit": "signal",
}
_SENTENCES = {name: sentence for sentence, names in _REPLACEMENTS.items() for name in names.split()}


def find_replacement(name: str) -> str:
    """Return a sentence that names the replacement for an option, without a full stop; empty if unknown."""
    key = name.lstrip("-").replace("_", "-").partition("=")[0]
    if name[:1] == "-" != name[1:2]:
        key = SHORT_NAMES.get(key, key)
    if sentence := _SENTENCES.get(key):
        return sentence
    option = all_options().get(key.replace("-", "_"))
    if option is None:
        return ""
    return f"Use {option.flag}" if option.on_command_line else f"Use --set {option.name}=VALUE"
