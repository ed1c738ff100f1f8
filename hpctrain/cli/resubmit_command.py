"""The command that repeats a run, from the specification in its folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.jobs.options.table import SbatchOptions, all_options
from hpctrain.slurm.duration import format_time_limit
from hpctrain.spec.directives import directives_after_start
from hpctrain.spec.job_spec import DEFAULT_SNAPSHOT_LIMIT_MB, JobSpec, default_stop_before_limit_s
from hpctrain.spec.notify import DEFAULT_STALL_S, NOTIFICATION_KINDS
from hpctrain.text import is_finite

#: Fields that every specification has; they are omitted if they have their default value.
_DEFAULTS = {
    "spare_nodes": JobSpec.spare_nodes,
    "node_check": JobSpec.node_check,
    "scale_up_after_s": JobSpec.scale_up_after_s,
    "max_failures": JobSpec.max_failures,
    "resume_mode": JobSpec.resume_mode,
    "mpi": JobSpec.mpi,
    "cpu_binding": JobSpec.cpu_binding,
    "gpu_request_style": JobSpec.gpu_request_style,
}


def resubmit_command(spec: Mapping[str, Any]) -> list[str]:
    """Return shell lines that submit the same script in a new run folder; empty without a script or folder.

    Args:
        spec: content of `spec.yaml`.
    """
    script = spec.get("script")
    if not isinstance(script, str) or not isinstance(workdir := spec.get("workdir"), str):
        return []
    options, call = submit_arguments(spec)
    words = ["hpctrain", "submit", *options, *call]
    return [*_code_lines(spec), f"cd {shlex.quote(workdir)}", shlex.join(words)]


def submit_arguments(spec: Mapping[str, Any], *, started: bool = True) -> tuple[list[str], list[str]]:
    """Return the options of `hpctrain submit` for a specification, and the script with its arguments.

    For a run that has started, options that delay the start are omitted.
    """
    if started and isinstance(directives := spec.get("directives"), Mapping):
        spec = {**spec, "directives": directives_after_start(directives)}
    marks = {"module": ["-m"], "command": ["--"]}.get(str(spec.get("program")), [])
    return list(_options(spec)), [*marks, str(spec["script"]), *_texts(spec.get("args"))]


def _code_lines(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a shell comment with the path of the copied code; a checkout can be used instead."""
    code = spec.get("code")
    if isinstance(code, Mapping) and code.get("copy"):
        yield f"# The code that ran: {_one_line(str(code['copy']))}"


def _options(spec: Mapping[str, Any]) -> Iterator[str]:
    nodes, least = spec.get("nodes") or 1, spec.get("min_nodes")
    yield f"--nodes={least}:{nodes}" if least and least != nodes else f"--nodes={nodes}"
    if gpus := spec.get("gpus_per_node"):
        yield (
            f"--gpus-per-node={spec['gpu_type']}:{gpus}"
            if spec.get("gpu_type")
            else f"--gpus-per-node={gpus}"
        )
    if (tasks := spec.get("ntasks_per_node")) and tasks != (gpus or 1):
        yield f"--ntasks-per-node={tasks}"
    for name in ("array", "cpus_per_task", "template", "backend", "name"):
        if (value := spec.get(name)) is not None:
            yield f"--{name.replace('_', '-')}={value}"
    if is_finite(limit_s := spec.get("time_limit_s")) or limit_s == math.inf:
        yield f"--time={format_time_limit(None if limit_s == math.inf else limit_s)}"
    lead_s = spec.get("stop_before_limit_s")
    if lead_s is not None and lead_s != default_stop_before_limit_s(limit_s if is_finite(limit_s) else None):
        yield f"--stop-before-limit={lead_s}"
    for name in ("standby_workers_s", "hang_timeout_s"):
        if (seconds := spec.get(name, missing := getattr(JobSpec, name))) != missing:
            yield f"--{name.removesuffix('_s').replace('_', '-')}={'never' if seconds is None else seconds}"
    for name, default in _DEFAULTS.items():
        if spec.get(name) not in (None, default):
            yield _option(name.removesuffix("_s"), spec[name])
    for name, value in _pairs(spec.get("env")):
        yield f"--env={name}={value}"
    for kind, changes in _mapping(spec.get("restart_policy")).items():
        for name, value in _pairs(changes):
            yield f"--restart-policy={kind}.{name}={value}"
    for name, value in _pairs(spec.get("directives")):
        yield _directive(name, value)
    yield from _shell(_mapping(spec.get("shell")))
    torchrun, container = _mapping(spec.get("torchrun")), _mapping(spec.get("container"))
    if torchrun:
        yield "--launcher=torchrun"
        yield _option("rdzv_backend", torchrun.get("rdzv_backend"))
        if torchrun.get("rdzv_endpoint"):
            yield _option("rdzv_endpoint", torchrun["rdzv_endpoint"])
    if container:
        for name in ("image", "runtime", "python"):
            if container.get(name):
                yield _option(f"container_{name}", container[name])
        for value in _texts(container.get("mounts")):
            yield f"--container-mounts={value}"
        if names := _texts(container.get("env")):
            yield _option("container_env", ",".join(names))
    notify = _mapping(spec.get("notify"))
    for target in _texts(notify.get("targets")):
        yield f"--notify={target}"
    if (on := _texts(notify.get("on"))) and tuple(on) != NOTIFICATION_KINDS:
        yield _option("notify_on", ",".join(on))
    if notify.get("stall_s") not in (None, DEFAULT_STALL_S):
        yield _option("notify_stall_after", notify["stall_s"])
    for name, source in _pairs(spec.get("stage")):
        yield f"--stage={source}:{name}"
    if spec.get("stage_environment"):
        yield "--stage-environment"
    if spec.get("independent_ranks"):
        yield "--independent-ranks"
    for option in _texts(spec.get("srun_args")):
        yield f"--srun-arg={option}"
    if not spec.get("code") and spec.get("supervised", True):
        yield "--no-code-snapshot"
    elif (limit_mb := _mapping(spec["code"]).get("limit_mb")) not in (None, DEFAULT_SNAPSHOT_LIMIT_MB):
        yield _option("code_snapshot_limit", limit_mb)


def _option(name: str, value: object) -> str:
    option = all_options()[name]
    return f"{option.flag}={value}" if option.about.on_command_line else f"--set={name}={value}"


def _directive(name: str, value: str) -> str:
    kind = SbatchOptions.__annotations__.get(name.replace("-", "_"))
    # On the command line, a flag of sbatch has no value.
    is_named = kind == int | str or name == "time" if value else kind in (bool, bool | str)
    option = f"--{name}" if is_named else f"--sbatch={name}"
    return f"{option}={value}" if value else option


def _shell(shell: Mapping[str, Any]) -> Iterator[str]:
    for name, option in (("modules", "module"), ("setup", "setup"), ("teardown", "teardown")):
        for value in _texts(shell.get(name)):
            yield f"--{option}={value}"
    for name in ("conda", "venv"):
        if shell.get(name):
            yield f"--{name}={shell[name]}"


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list | tuple) else []


def _pairs(values: object) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in _mapping(values).items()]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one_line(text: str) -> str:
    return " ".join(text.split())
