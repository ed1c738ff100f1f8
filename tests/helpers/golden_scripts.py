"""Jobs whose batch scripts are stored in `golden/`, one per template and feature.

    PYTHONPATH=tests .venv/bin/python -m helpers.golden_scripts

rewrites them; `git diff` then shows the effect of a changed template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hpctrain
from helpers import REPOSITORY
from hpctrain.jobs.submit.render import render
from hpctrain.jobspec.container import Container
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.launcher import TorchrunConfig
from hpctrain.jobspec.shell_setup import ShellSetup

FOLDER = REPOSITORY / "tests" / "jobs" / "golden"

SHELL = ShellSetup(modules=("cuda/12.4", "nccl 2"), setup=("ulimit -c 0", "export A='b c'"))

JOBS: dict[str, dict[str, Any]] = {
    "apptainer": {"container": Container(image="/home/me/torch.sif", runtime="apptainer")},
    "cpu": {"ntasks_per_node": 2},
    "cpu-shell": {"shell": SHELL, "cpus_per_task": 4, "directives": {"mem": "8G", "exclusive": ""}},
    "ddp": {"nodes": 2, "gpus_per_node": 2, "time_limit_s": 3600.0},
    "ddp-array": {"gpus_per_node": 1, "array": "0-3%2", "directives": {"partition": "urgent"}},
    "ddp-conda-name": {"gpus_per_node": 2, "python": "python", "shell": ShellSetup(conda="torch")},
    "ddp-conda-path": {"gpus_per_node": 2, "shell": ShellSetup(conda="/home/me/my envs/torch")},
    "ddp-gpus-per-node": {"gpus_per_node": 2, "gpu_request_style": "gpus-per-node"},
    "ddp-venv": {
        "gpus_per_node": 2,
        "python": "/home/me/it's/bin/python",
        "shell": ShellSetup(modules=("cuda",), venv="/home/me/it's"),
    },
    "ddp2": {"nodes": 2, "gpus_per_node": 2, "template": "ddp2"},
    "elastic": {"nodes": 4, "min_nodes": 2, "gpus_per_node": 2, "cpus_per_task": 4},
    "elastic-spare": {
        "nodes": 4,
        "min_nodes": 2,
        "spare_nodes": 1,
        "resume_mode": "successor",
        "stage": {"tokens": "/data/my tokens.bin"},
    },
    "elastic-cpu": {"nodes": 4, "min_nodes": 1, "ntasks_per_node": 2},
    "local": {"backend": "local", "nodes": 2, "ntasks_per_node": 2},
    "plain": {
        "template": "plain",
        "supervised": False,
        "nodes": 2,
        "gpus_per_node": 2,
        "env": {"NCCL_DEBUG": "INFO"},
    },
    "pyxis": {
        "nodes": 2,
        "gpus_per_node": 2,
        "container": Container(image="nvcr.io#nvidia/pytorch:25.03-py3", runtime="pyxis"),
    },
    "torchrun": {"nodes": 2, "gpus_per_node": 2, "cpus_per_task": 4, "torchrun": TorchrunConfig()},
    "torchrun-cpu-etcd": {
        "nodes": 2,
        "ntasks_per_node": 2,
        "torchrun": TorchrunConfig(rdzv_backend="etcd-v2", rdzv_endpoint="etcd:2379"),
    },
    "words": {"name": "a 'b' #c", "run_dir": "/home/me/run $(d) %j", "directives": {"comment": 'say "x"'}},
}


def golden_spec(name: str) -> JobSpec:
    defaults = {"script": "/home/me/train.py", "name": "train", "run_id": "train-1", "backend": "slurm"}
    paths = {"run_dir": "/home/me/runs/train-1", "workdir": "/home/me", "python": "/usr/bin/python3"}
    return JobSpec(**{**defaults, **paths, **JOBS[name]})


def golden_text(name: str) -> str:
    """Return its batch script, without the version."""
    return render(golden_spec(name)).replace(f" {hpctrain.__version__} ", " VERSION ")


def golden_file(name: str) -> Path:
    return FOLDER / f"{name}.sbatch"


if __name__ == "__main__":
    for name in JOBS:
        golden_file(name).write_text(golden_text(name))
