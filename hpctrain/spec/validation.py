"""Check a specification: ranges, contradictions, and characters that cannot be passed on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import get_args

from hpctrain.errors import SpecError, UserError
from hpctrain.rundir import ENV_PREFIX
from hpctrain.slurm.job_array import JobArray
from hpctrain.spec.job_spec import (
    BackendName,
    CpuBindingMode,
    GpuRequestStyle,
    JobSpec,
    MpiPlugin,
    NodeCheckMode,
    ResumeMode,
)
from hpctrain.spec.launcher import ProgramKind
from hpctrain.spec.restart_policy import RestartPolicy
from hpctrain.spec.step_options import check_srun_args

#: Slurm stores the lead time of `--signal` in 16 bits.
_MAX_SIGNAL_LEAD_S = 65535

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
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

#: Mutually exclusive pairs. For the last pair, Slurm would silently use the later option.
_EITHER = (*combinations(("mem", "mem-per-cpu", "mem-per-gpu"), 2), ("exclusive", "oversubscribe"))
#: Linux accepts 128 KiB per argument, with its terminating NUL (MAX_ARG_STRLEN, execve(2)).
_MAX_WORD_BYTES = 128 * 1024 - 1
#: Bytes that a torchrun agent receives in addition to the arguments.
_PLAN_BYTES = 4096
#: Linux allows 2 MiB for all arguments and variables of a process; this part is reserved for the job's own
#: variables.
_ALL_BYTES = 1024 * 1024


def check_spec(spec: JobSpec) -> None:
    """Check that a job with this specification can run, and that every word is passed on unchanged."""
    _check_choice("backend", spec.backend, BackendName)
    _check_choice("gpu-request-style", spec.gpu_request_style, GpuRequestStyle)
    _check_choice("program", spec.program, ProgramKind)
    _check_choice("node-check", spec.node_check, NodeCheckMode)
    _check_choice("mpi", spec.mpi, MpiPlugin)
    _check_choice("cpu-binding", spec.cpu_binding, CpuBindingMode)
    _check_choice("resume-mode", spec.resume_mode, ResumeMode)
    _check_array(spec)
    _check_folder(spec)
    _check_shape(spec)
    _check_time(spec)
    _check_directives(spec)
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
    _check_lengths(spec)


def _check_choice(option: str, value: str, choices: object) -> None:
    known = get_args(choices)
    if value not in known:
        raise SpecError(f"Unknown {option} {value!r} (--{option}). Choose from {', '.join(known)}.")


def _check_array(spec: JobSpec) -> None:
    if spec.array is not None:
        JobArray.parse(spec.array)


def _check_folder(spec: JobSpec) -> None:
    if spec.backend == "slurm" and "\\" in spec.run_dir:
        # Slurm 22.05 reads a backslash as a switch that disables %-symbols; 26.05 drops all backslashes,
        # including doubled backslashes.
        raise SpecError(
            f"The path of the run folder {spec.run_dir!r} (--run-dir, --runs-dir or --name) contains a "
            "backslash, which Slurm removes from the path of the job's log (sbatch --output). Choose another "
            "folder."
        )


def _check_shape(spec: JobSpec) -> None:
    if spec.nodes < 1:
        raise SpecError(f"--nodes is {spec.nodes}, but must be at least 1.")
    if not 1 <= spec.min_nodes <= spec.nodes:
        raise SpecError(
            f"The minimum number of nodes is {spec.min_nodes} and the maximum is {spec.nodes} "
            "(--nodes), but a range "
            "requires 1 ≤ MIN ≤ MAX, as in 2:4."
        )
    if spec.spare_nodes < 0:
        raise SpecError(f"--spare-nodes is {spec.spare_nodes}, but must be 0 or more.")
    if spec.scale_up_after_s < 0:
        raise SpecError(f"scale_up_after is {spec.scale_up_after_s} s, but must be 0 or more.")
    if spec.gpus_per_node < 0:
        raise SpecError(
            f"--gpus-per-node is {spec.gpus_per_node}, but must be 0 or more. Use 0 to train on CPUs."
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
    if spec.ntasks_per_node < 1:
        raise SpecError(f"--ntasks-per-node is {spec.ntasks_per_node}, but must be at least 1.")
    if spec.gpus_per_node % spec.ntasks_per_node:
        raise SpecError(
            f"There are {spec.gpus_per_node} GPUs (--gpus-per-node) and {spec.ntasks_per_node} ranks "
            "(--ntasks-per-node) per node, but each rank needs the same number of GPUs. Remove "
            "--ntasks-per-node to start one rank per GPU, or set it to a divisor of the number of GPUs."
        )
    if spec.cpus_per_task is not None and spec.cpus_per_task < 1:
        raise SpecError(f"--cpus-per-task is {spec.cpus_per_task}, but must be at least 1.")
    if spec.max_failures < 1:
        raise SpecError(
            f"--max-failures is {spec.max_failures}, but must be at least 1. "
            "With 1, the run ends at the first failure."
        )
    RestartPolicy.with_changes(spec.restart_policy, spec.max_failures)


def _check_directives(spec: JobSpec) -> None:
    """Check that no directives contradict each other or the size of the run."""
    directives = spec.directives
    for one, other in _EITHER:
        if one in directives and other in directives:
            raise SpecError(
                f"{_as_option(one, directives)} and {_as_option(other, directives)} are mutually exclusive "
                "in Slurm. Remove one of them."
            )
    if "mem-per-gpu" in directives and spec.gpus_per_node == 0:
        raise SpecError(
            f"{_as_option('mem-per-gpu', directives)} requires GPUs, but the run has none (--gpus-per-node "
            "0). Use --mem or --mem-per-cpu instead."
        )
    if any(part.partition(":")[0] == "gpu" for part in directives.get("gres", "").split(",")):
        raise SpecError(
            f"{_as_option('gres', directives)} requests GPUs. "
            "Use --gpus-per-node for GPUs, and --gres for other resources."
        )
    _check_nodes(directives, spec.most_granted)


def _check_nodes(directives: Mapping[str, str], nodes: int) -> None:
    wanted, unwanted = _hosts("nodelist", directives), _hosts("exclude", directives)
    if both := [host for host in wanted if host in unwanted]:
        raise SpecError(
            f"{_as_option('nodelist', directives)} requests node {both[0]}, but "
            f"{_as_option('exclude', directives)} excludes this node. Remove the node from one of the "
            "options."
        )
    if len(wanted) > nodes:
        raise SpecError(
            f"{_as_option('nodelist', directives)} names {len(wanted)} nodes, and all of them are required, "
            f"but the job requests only {nodes} (--nodes plus --spare-nodes). Request more nodes, or name "
            "fewer."
        )


def _hosts(key: str, directives: Mapping[str, str]) -> dict[str, None]:
    """Return the nodes in a directive, in order; empty for the name of a node file (sbatch(1))."""
    value = directives.get(key, "")
    if not value or "/" in value:
        return {}
    from hpctrain.cluster import expand_hostlist

    try:
        return dict.fromkeys(expand_hostlist(value))
    except UserError as error:
        raise SpecError(f"Invalid --{key}: {error}") from error


def _as_option(key: str, directives: Mapping[str, str]) -> str:
    value = directives[key]
    return f"--{key} {value}" if value else f"--{key}"


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
    """Reject what only the supervisor can do."""
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
    for what, path in (
        *([("script", spec.script)] if spec.program == "script" else []),
        ("run folder", spec.run_dir),
        ("working directory", spec.workdir),
    ):
        if not Path(path).is_absolute():
            raise SpecError(f"The path of the {what} is {path!r}, but must be absolute.")
    for name in spec.env:
        if not _VARIABLE_NAME.fullmatch(name):
            raise SpecError(
                f"{name!r} (--env) is not a valid name of an environment variable. Use letters, digits and "
                "_, and do not start with a digit."
            )
        if name in _RANK_VARIABLES:
            raise SpecError(
                f"hpctrain sets the variable {name} for each rank, so --env {name}={spec.env[name]} "
                "would have no effect. Remove this option."
            )
    for what, word in (("job name", spec.name), ("run id", spec.run_id)):
        if not word:
            raise SpecError(f"The {what} is empty. Use at least one character.")
    plain, in_script = _plain_words(spec), _words_of_script(spec)
    for what, word in in_script:
        if match := CONTROL_CHARACTER.search(word):
            raise SpecError(
                f"The {what} {word!r} contains the control character {match[0]!r}, which is not allowed in a "
                "batch script. Remove this character."
            )
    for what, word in plain:
        if "\x00" in word:
            raise SpecError(
                f"The {what} {word!r} contains a NUL character, which cannot be passed to a process. "
                "Remove this character."
            )
    for what, word in (*plain, *in_script):
        if not _is_utf8(word):
            mend = "Rename it." if what.startswith("path") else "Change it."
            raise SpecError(f"The {what} {word!r} is not valid UTF-8, so it cannot be stored. {mend}")


def _words_of_script(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the words for a line of the batch script, with descriptions."""
    return [
        ("job name", spec.name),
        ("path of the run folder", spec.run_dir),
        ("run id", spec.run_id),
        ("path of the interpreter", spec.python),
        *((f"value of --{key}", value) for key, value in spec.directives.items()),
        *(("option", key) for key in spec.directives),
        *([("template", spec.template)] if spec.template is not None else []),
        *(("module", module) for module in spec.shell.modules),
        *(
            (f"value of --{name}", value)
            for name in ("conda", "venv")
            if (value := getattr(spec.shell, name))
        ),
    ]


def _plain_words(spec: JobSpec) -> list[tuple[str, str]]:
    """Return the words that are passed to a process without a shell, with descriptions."""
    return [
        ("path of the script" if spec.program == "script" else spec.program, spec.script),
        ("path of the working directory", spec.workdir),
        *(("argument", arg) for arg in spec.args),
        *(("line of --setup", line) for line in spec.shell.setup),
        *(("line of --teardown", line) for line in spec.shell.teardown),
        *(("value of --srun-arg", option) for option in spec.srun_args),
        *([("image", spec.container.image)] if spec.container else []),
        *(("target of --notify", target) for target in spec.notify.targets),
        *((f"source of {name} (--stage)", source) for name, source in spec.stage.items()),
        *(("mount", mount) for mount in (spec.container.mounts if spec.container else ())),
        *((f"value of the variable {name}", value) for name, value in spec.env.items()),
    ]


def _is_utf8(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_lengths(spec: JobSpec) -> None:
    # The rank receives all arguments as one JSON string; through an agent, that string is nested in another.
    words = json.dumps([spec.entry, *spec.args])
    length, limit = len(words), _MAX_WORD_BYTES
    if spec.torchrun is not None:
        length, limit = len(json.dumps(words)), limit - _PLAN_BYTES
    if length > limit:
        raise SpecError(
            f"The program and its arguments are {length} bytes long as JSON, but at most {limit} bytes "
            "can be passed to a rank. Write the arguments to a file, and pass its path instead."
        )
    longest = _MAX_WORD_BYTES - len(ENV_PREFIX)
    variables = {name: len(f"{name}={value}".encode()) for name, value in spec.env.items()}
    for name, length in variables.items():
        if length > longest:
            raise SpecError(
                f"The variable {name} (--env) is {length} bytes long, but at most {longest} bytes can be "
                "passed to a rank. Write the value to a file, and pass its path instead."
            )
    if (total := sum(variables.values())) > _ALL_BYTES:
        raise SpecError(
            f"The variables (--env) are {total} bytes long in total, but at most {_ALL_BYTES} bytes can be "
            "passed to a rank. Write the values to files, and pass their paths instead."
        )
