"""Check a specification: ranges, contradictions, and characters that cannot be passed on."""

from __future__ import annotations

import re
from typing import get_args

from hpctrain.errors import SpecError
from hpctrain.jobspec.container import VARIABLE_NAME
from hpctrain.jobspec.job_spec import (
    BackendName,
    CpuBindingMode,
    GpuRequestStyle,
    JobSpec,
    MpiPlugin,
    NodeCheckMode,
    ResumeMode,
)
from hpctrain.jobspec.launcher import ProgramKind
from hpctrain.jobspec.restart_policy import RestartPolicy
from hpctrain.jobspec.step_options import check_srun_args
from hpctrain.slurm.job_array import JobArray

_CHOICES = {
    "backend": BackendName,
    "gpu_request_style": GpuRequestStyle,
    "program": ProgramKind,
    "node_check": NodeCheckMode,
    "mpi": MpiPlugin,
    "cpu_binding": CpuBindingMode,
    "resume_mode": ResumeMode,
}
_LEAST = {
    **dict.fromkeys(("spare_nodes", "scale_up_after_s", "gpus_per_node"), 0),
    **dict.fromkeys(("nodes", "ntasks_per_node", "cpus_per_task", "max_failures"), 1),
}
#: Slurm stores the lead time of `--signal` in 16 bits.
_MAX_SIGNAL_LEAD_S = 65535

#: Variables that identify a rank; they are set when the ranks start.
_RANK_VARIABLES = frozenset(
    {
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }
)
#: Names that begin with a dot are used by hpctrain.
_STAGED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)
_GPU_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
#: Characters not allowed in a line of a batch script.
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def check_spec(spec: JobSpec) -> None:
    """Check that a job with this specification can run, and that every word is passed on unchanged.

    Raises:
        SpecError: a value is out of range, contradicts another, or cannot be passed on unchanged.
    """
    for field, choices in _CHOICES.items():
        if (choice := getattr(spec, field)) not in get_args(choices):
            option = field.replace("_", "-")
            raise SpecError(
                f"Unknown {option} {choice!r} (--{option}). Choose from {', '.join(get_args(choices))}."
            )
    for field, minimum in _LEAST.items():
        if (value := getattr(spec, field)) is not None and value < minimum:
            option = "scale_up_after" if field == "scale_up_after_s" else f"--{field.replace('_', '-')}"
            raise SpecError(f"{option} is {value}, but must be at least {minimum}.")
    if spec.array is not None:
        JobArray.parse(spec.array)
    if spec.backend == "slurm" and "\\" in spec.run_dir:
        # Slurm 22.05 reads a backslash as a switch that disables %-symbols; 26.05 drops all backslashes,
        # including doubled backslashes.
        raise SpecError(
            f"The path of the run folder {spec.run_dir!r} (--run-dir, --runs-dir or --name) contains a "
            "backslash, which Slurm removes from the path of the job's log (sbatch --output). Choose another "
            "folder."
        )
    _check_shape(spec)
    _check_time(spec)
    gres = spec.directives.get("gres", "")
    if any(resource.partition(":")[0] == "gpu" for resource in gres.split(",")):
        raise SpecError(
            f"--gres {gres} requests GPUs. Use --gpus-per-node for GPUs, and --gres for other resources."
        )
    RestartPolicy.with_changes(spec.restart_policy, spec.max_failures)
    spec.shell.check()
    check_srun_args(spec.srun_args)
    if spec.torchrun is not None:
        spec.torchrun.check()
    if spec.container is not None:
        spec.container.check(spec.folders)
    spec.notify.check()
    _check_stage(spec)
    if not spec.supervised:
        _check_unsupervised(spec)
    _check_words(spec)


def _check_shape(spec: JobSpec) -> None:
    if not 1 <= spec.min_nodes <= spec.nodes:
        raise SpecError(
            f"The minimum number of nodes is {spec.min_nodes} and the maximum is {spec.nodes} (--nodes), but "
            "a range requires 1 ≤ MIN ≤ MAX, as in 2:4."
        )
    if spec.gpu_type is not None:
        if not _GPU_TYPE.fullmatch(spec.gpu_type):
            raise SpecError(
                f"{spec.gpu_type!r} is not a valid GPU type (--gpus-per-node). Use letters, digits, _, . and "
                "-, and start with a letter or digit, as in h100:8 for eight GPUs of type h100."
            )
        if spec.gpus_per_node == 0:
            raise SpecError(
                f"GPU type {spec.gpu_type} was requested, but the number of GPUs is 0 (--gpus-per-node). "
                "Use a positive number of GPUs, or --gpus-per-node 0 without a type to train on CPUs."
            )
    if spec.gpus_per_node % spec.ntasks_per_node:
        raise SpecError(
            f"There are {spec.gpus_per_node} GPUs (--gpus-per-node) and {spec.ntasks_per_node} ranks "
            "(--ntasks-per-node) per node, but each rank needs the same number of GPUs. Remove "
            "--ntasks-per-node to start one rank per GPU, or set it to a divisor of the number of GPUs."
        )


def _check_time(spec: JobSpec) -> None:
    if not 1 <= spec.stop_before_limit_s <= _MAX_SIGNAL_LEAD_S:
        raise SpecError(
            f"--stop-before-limit is {spec.stop_before_limit_s} s, "
            f"but Slurm accepts 1 to {_MAX_SIGNAL_LEAD_S} s."
        )
    if spec.time_limit_s is not None and spec.time_limit_s <= spec.stop_before_limit_s:
        raise SpecError(
            f"The time limit is {spec.time_limit_s:g} s (--time), but the ranks stop and save "
            f"{spec.stop_before_limit_s} s before the limit (--stop-before-limit), so there is no time to "
            "train. Use a longer --time or a shorter --stop-before-limit."
        )


def _check_stage(spec: JobSpec) -> None:
    for name, source in spec.stage.items():
        if not _STAGED_NAME.fullmatch(name):
            raise SpecError(
                f"{name!r}, the name of the copy of {source!r} (--stage), is not valid. Use letters, digits, "
                "., _ and -, and start with a letter or digit: --stage SRC:NAME."
            )
    if spec.stage_environment and spec.container is not None:
        raise SpecError(
            "The ranks use the Python environment of the container image (--container-image), so it cannot "
            "be staged. Remove --stage-environment."
        )


def _check_unsupervised(spec: JobSpec) -> None:
    if spec.backend == "local":
        raise SpecError(
            "--template plain starts the ranks with srun, but the backend is local (--backend). Submit to "
            "Slurm, or use another template."
        )
    needs_supervisor = {
        f"--nodes {spec.min_nodes}:{spec.nodes}": spec.is_elastic,
        "--spare-nodes": spec.spare_nodes,
        "--array": spec.array,
        "--launcher torchrun": spec.torchrun,
        "--container-image": spec.container,
        "--stage": spec.stage,
        "--stage-environment": spec.stage_environment,
        "--notify": spec.notify.targets,
        "Several ranks per node with several GPUs each": spec.gpus_per_task > 1 and spec.ntasks_per_node > 1,
    }
    for option, is_requested in needs_supervisor.items():
        if is_requested:
            raise SpecError(
                f"{option} needs hpctrain in the job, which --template plain leaves out. Remove one of them."
            )


def _check_words(spec: JobSpec) -> None:
    for name in spec.env:
        if not VARIABLE_NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} (--env) is not a valid name of an environment variable. Use letters, digits and "
                "_, and do not start with a digit."
            )
        if name in _RANK_VARIABLES:
            raise SpecError(
                f"hpctrain sets the variable {name} for each rank, so --env {name}={spec.env[name]} "
                "would have no effect. Remove this option."
            )
    for description, text in (("job name", spec.name), ("run id", spec.run_id)):
        if not text:
            raise SpecError(f"The {description} is empty. Use at least one character.")
    script_texts = _script_texts(spec)
    for description, text in script_texts:
        if match := CONTROL_CHARACTER.search(text):
            raise SpecError(
                f"The {description} {text!r} contains the control character {match[0]!r}, which is not "
                "allowed in a batch script. Remove this character."
            )
    for description, text in (*_process_texts(spec), *script_texts):
        if "\x00" in text:
            raise SpecError(
                f"The {description} {text!r} contains a NUL character, which cannot be passed to a process. "
                "Remove this character."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            remedy = "Rename it." if description.startswith("path") else "Change it."
            raise SpecError(
                f"The {description} {text!r} is not valid UTF-8, so it cannot be stored. {remedy}"
            ) from None


def _script_texts(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the texts for a line of the batch script, with descriptions."""
    return [
        ("job name", spec.name),
        ("path of the run folder", spec.run_dir),
        ("run id", spec.run_id),
        ("path of the interpreter", spec.python),
        *((f"value of --{key}", value) for key, value in spec.directives.items()),
        *(("option", key) for key in spec.directives),
        ("template", spec.template or ""),
        *(("module", module) for module in spec.shell.modules),
        *((f"value of --{name}", getattr(spec.shell, name) or "") for name in ("conda", "venv")),
    ]


def _process_texts(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the texts that are passed to a process without a shell, with descriptions."""
    texts = {
        "argument": spec.args,
        "line of --setup": spec.shell.setup,
        "line of --teardown": spec.shell.teardown,
        "value of --srun-arg": spec.srun_args,
        "image": [spec.container.image] if spec.container else [],
        "mount": spec.container.mounts if spec.container else [],
        "target of --notify": spec.notify.targets,
    }
    return [
        ("path of the script" if spec.program == "script" else spec.program, spec.script),
        ("path of the working directory", spec.workdir),
        *((description, text) for description, values in texts.items() for text in values),
        *((f"source of {name} (--stage)", source) for name, source in spec.stage.items()),
        *((f"value of the variable {name}", value) for name, value in spec.env.items()),
    ]
