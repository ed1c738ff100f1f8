"""The command that repeats a run, from the specification in its folder."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.jobs.options.spec_builder import SPEC_FIELDS
from hpctrain.jobs.options.table import all_options
from hpctrain.jobspec.directives import directives_after_start
from hpctrain.jobspec.job_spec import default_stop_before_limit_s
from hpctrain.jobspec.notify import NOTIFICATION_KINDS
from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.sbatch_options import SBATCH_FLAGS, SBATCH_OPTIONS
from hpctrain.text import is_finite

#: Fields that are None if the option is `never`.
_NEVER = ("standby_workers_s", "hang_timeout_s")


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
    """Yield the options whose values differ from the defaults."""
    for name, value in _values(spec).items():
        option = all_options()[name]
        if value in (None, "", option.default):
            continue
        if name == "sbatch":
            yield from (_directive(key, text) for key, text in _pairs(value))
        elif option.kind.pairs:
            yield from (f"{option.flag}={key}={text}" for key, text in _pairs(value))
        elif option.kind.many and option.on_command_line:
            yield from (f"{option.flag}={text}" for text in _texts(value))
        elif option.kind.many:
            if texts := _texts(value):
                yield f"--set={name}={','.join(texts)}"
        elif option.kind.flag:
            yield option.flag if value else f"--no-{option.flag[2:]}"
        else:
            yield f"{option.flag}={value}" if option.on_command_line else f"--set={name}={value}"


def _values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of `hpctrain submit`, by name."""
    nodes, least, limit_s = spec.get("nodes") or 1, spec.get("min_nodes"), spec.get("time_limit_s")
    gpus, gpu_type = spec.get("gpus_per_node"), spec.get("gpu_type")
    tasks, lead_s = spec.get("ntasks_per_node"), spec.get("stop_before_limit_s")
    shell, torchrun, container, notify, code = (
        _mapping(spec.get(name)) for name in ("shell", "torchrun", "container", "notify", "code")
    )
    is_limited = is_finite(limit_s)
    return {
        "nodes": f"{least}:{nodes}" if least and least != nodes else str(nodes),
        "gpus_per_node": f"{gpu_type}:{gpus}" if gpus and gpu_type else gpus,
        "ntasks_per_node": tasks if tasks != (gpus or 1) else None,
        **{name: spec.get(name) for name in ("array", "template", "backend", "name")},
        "time": format_time_limit(limit_s if is_limited else None)
        if is_limited or limit_s == math.inf
        else None,
        **{
            option: "never" if field in _NEVER and spec.get(field, "") is None else spec.get(field)
            for field, option in SPEC_FIELDS.items()
        },
        "stop_before_limit": lead_s
        if lead_s != default_stop_before_limit_s(limit_s if is_limited else None)
        else None,
        "env": spec.get("env"),
        "restart_policy": {
            f"{kind}.{name}": value
            for kind, changes in _mapping(spec.get("restart_policy")).items()
            for name, value in _pairs(changes)
        },
        "sbatch": spec.get("directives"),
        "module": shell.get("modules"),
        **{name: shell.get(name) for name in ("setup", "teardown", "conda", "venv")},
        "launcher": "torchrun" if torchrun else None,
        **{name: torchrun.get(name) for name in ("rdzv_backend", "rdzv_endpoint")},
        **{
            f"container_{name}": container.get(name)
            for name in ("image", "runtime", "python", "mounts", "env")
        },
        "notify": notify.get("targets"),
        "notify_on": on if tuple(on := _texts(notify.get("on"))) != NOTIFICATION_KINDS else None,
        "notify_stall_after": notify.get("stall_s"),
        "stage": [f"{source}:{name}" for name, source in _pairs(spec.get("stage"))],
        "srun_arg": spec.get("srun_args"),
        "code_snapshot": None if code or not spec.get("supervised", True) else False,
        "code_snapshot_limit": code.get("limit_mb"),
    }


def _directive(name: str, value: str) -> str:
    # On the command line, a flag of sbatch has no value.
    is_named = name.replace("-", "_") in SBATCH_OPTIONS or name == "time"
    is_flag = is_named and (name in SBATCH_FLAGS) != bool(value)
    option = f"--{name}" if is_flag else f"--sbatch={name}"
    return f"{option}={value}" if value else option


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list | tuple) else []


def _pairs(values: object) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in _mapping(values).items()]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one_line(text: str) -> str:
    return " ".join(text.split())
