"""The command that does what a run did once more, out of what the run folder says was asked for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.jobs.notify import DEFAULT_STALL_S, OCCASIONS
from hpctrain.jobs.options import options
from hpctrain.jobs.spec import DEFAULT_SIGNAL_LEAD_S, JobSpec

#: Fields that a specification has in any case, and that need not be said where they are as ever.
_DEFAULTS = {
    "signal_lead_s": DEFAULT_SIGNAL_LEAD_S,
    "spares": JobSpec.spares,
    "node_check": JobSpec.node_check,
    "grow_after_s": JobSpec.grow_after_s,
    "max_failures": JobSpec.max_failures,
    "continue_by": JobSpec.continue_by,
    "gpu_directive": JobSpec.gpu_directive,
}


def command_again(spec: Mapping[str, Any]) -> list[str]:
    """Lines of shell that submit the same script again, in a new run folder; none where little is known.

    Args:
        spec: what `spec.yaml` holds.
    """
    script = spec.get("script")
    if not isinstance(script, str) or not isinstance(workdir := spec.get("workdir"), str):
        return []
    lines = list(_code_lines(spec))
    words = ["hpctrain", "submit", *_options(spec), script, *_texts(spec.get("args"))]
    return [*lines, f"cd {shlex.quote(workdir)}", shlex.join(words)]


def _code_lines(spec: Mapping[str, Any]) -> Iterator[str]:
    """Where the code lies that the run ran, as a remark: whoever has it checked out needs no other."""
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
    if (tasks := spec.get("tasks_per_node")) and tasks != gpus:
        yield f"--tasks-per-node={tasks}"
    for name in ("array", "cpus_per_task", "template", "backend", "name"):
        if (value := spec.get(name)) is not None:
            yield f"--{name.replace('_', '-')}={value}"
    if (limit_s := spec.get("time_limit_s")) is not None:
        yield f"--time={_time(float(limit_s))}"
    for name, default in _DEFAULTS.items():
        if spec.get(name) not in (None, default):
            yield f"--{name.removesuffix('_s').replace('_', '-')}={spec[name]}"
    for name, value in _pairs(spec.get("env")):
        yield f"--env={name}={value}"
    for kind, changes in _mapping(spec.get("restart")).items():
        for name, value in _pairs(changes):
            yield f"--restart={kind}.{name}={value}"
    for name, value in _pairs(spec.get("directives")):
        yield _directive(name, value)
    yield from _shell(_mapping(spec.get("shell")))
    torchrun, container = _mapping(spec.get("torchrun")), _mapping(spec.get("container"))
    if torchrun:
        yield "--launcher=torchrun"
        yield f"--rdzv-backend={torchrun.get('rdzv_backend')}"
        if torchrun.get("rdzv_endpoint"):
            yield f"--rdzv-endpoint={torchrun['rdzv_endpoint']}"
    if container:
        for name in ("image", "runtime", "python"):
            if container.get(name):
                yield f"--container-{name}={container[name]}"
        for name in ("mounts", "env"):
            for value in _texts(container.get(name)):
                yield f"--container-{name}={value}"
    notify = _mapping(spec.get("notify"))
    for target in _texts(notify.get("targets")):
        yield f"--notify={target}"
    if (on := _texts(notify.get("on"))) and tuple(on) != OCCASIONS:
        for occasion in on:
            yield f"--notify-on={occasion}"
    if notify.get("stall_s") not in (None, DEFAULT_STALL_S):
        yield f"--notify-stall-after={notify['stall_s']}"
    if not spec.get("code"):
        yield "--no-snapshot"


def _directive(name: str, value: str) -> str:
    option = options().get(name.replace("-", "_"))
    # A time is one only where there is to be no limit.
    if option is None or not (option.about.directive or name == "time"):
        return f"--sbatch={name}={value}" if value else f"--sbatch={name}"
    if option.kind.flag:
        # On the command line it takes no word, as it may in a file.
        return f"--set={option.name}={value}" if value else option.flag
    return f"{option.flag}={value}"


def _shell(shell: Mapping[str, Any]) -> Iterator[str]:
    for name, option in (("modules", "module"), ("setup", "setup")):
        for value in _texts(shell.get(name)):
            yield f"--{option}={value}"
    for name in ("conda", "venv"):
        if shell.get(name):
            yield f"--{name}={shell[name]}"


def _time(seconds: float) -> str:
    """In Slurm's notation, which has no parts of a second."""
    if seconds == float("inf"):
        return "unlimited"
    whole = round(seconds)
    return f"{whole // 86400}-{whole % 86400 // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list | tuple) else []


def _pairs(values: object) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in _mapping(values).items()]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one_line(text: str) -> str:
    return " ".join(text.split())
