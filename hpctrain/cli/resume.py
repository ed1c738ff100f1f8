"""Submit an ended run again, optionally with other options (`hpctrain resume`)."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from hpctrain.cli.common import program_name, run_argument, run_reference, short_path
from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobs.options.resolved_options import previous_values
from hpctrain.jobs.options.spec_builder import SPEC_FIELDS
from hpctrain.jobspec.job_directives import directives_after_start
from hpctrain.jobspec.job_spec import default_stop_before_limit_s
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.jobspec.notify import NOTIFICATION_KINDS
from hpctrain.rundir import RunDir
from hpctrain.slurm.parsing import format_time_limit
from hpctrain.slurm.sbatch_options import BATCH_KEYS, SBATCH_FLAGS, SBATCH_OPTIONS
from hpctrain.slurm.states import RunState
from hpctrain.text import is_finite

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus

#: Options that change the output, not the job.
_OUTPUT_OPTIONS = {"--json", "--follow", "--dry-run", "--show-config"}
#: Options of a batch script that are part of its directives, or have no effect.
_OF_DIRECTIVES = {*BATCH_KEYS.values(), "sbatch", "stop_before_limit", "code_snapshot"} - {"name", "array"}
#: Fields that are None if the option is `never`.
_NEVER = ("standby_workers_s", "hang_timeout_s")


def _show_help(ctx: click.Context, _param: click.Parameter, options: tuple[str, ...]) -> tuple[str, ...]:
    if not ctx.resilient_parsing and set(options) & set(ctx.help_option_names):
        click.echo(ctx.get_help())
        ctx.exit()
    return options


@click.command("resume", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.pass_context
@run_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED, is_eager=True, callback=_show_help)
def command(context: click.Context, run: Run, options: tuple[str, ...]) -> None:
    """Submit an ended RUN as a new job that resumes from the newest valid checkpoint.

    The job uses the script, arguments and options of the last submission. OPTIONS of `hpctrain submit`, such
    as --nodes 8 or --time 4:00:00, override them. To change the arguments, or the script:

    \b
        hpctrain resume RUN [OPTIONS] -- ARGS
        hpctrain resume RUN [OPTIONS] SCRIPT [ARGS]
    """  # noqa: D301
    from hpctrain.cli import submit

    folder = run.dir
    spec = load_spec(folder.spec)
    if folder.function.exists():
        raise SpecError(
            f"Run {run.run_id} calls a function, which can only be submitted from Python. Submit the "
            "function again from Python."
        )
    if folder.sweep.exists():
        raise SpecError(
            f"Run {run.run_id} is a sweep, whose trials have different arguments. Use `hpctrain sweep "
            f"resume {run_reference(str(folder.path))}`, or resume a single trial."
        )
    _check_state(run.status(), changed=not _OUTPUT_OPTIONS.issuperset(options))
    # Relative paths in OPTIONS refer to the folder of the submission, as in the run's files.
    target = folder.array or folder
    fields = to_builtins(spec) | ({} if spec.array_task is None else {"array": spec.array_task})
    with resubmission(context, fields, target, options, started=bool(folder.attempts())) as inner:
        os.chdir(spec.workdir)
        submit.command.invoke(inner)


def _check_state(status: RunStatus, *, changed: bool) -> None:
    """Reject a run that is active, or complete with unchanged options."""
    from hpctrain.record_types import StepRecord
    from hpctrain.records.log_tail import read_last_records

    handle = run_reference(status.run_dir)
    match status.state:
        case RunState.PENDING:
            raise SpecError(
                f"Run {status.run_id} is still pending. Cancel it first: `hpctrain cancel {handle}`."
            )
        case RunState.RUNNING:
            raise SpecError(
                f"Run {status.run_id} is still running. Cancel it first, or use `hpctrain requeue {handle}`. "
                f"If you have already cancelled it, wait until it ends: `hpctrain wait {handle}`."
            )
        case RunState.COMPLETED if not changed:
            record = next(read_last_records(status.dir.metrics, StepRecord), None)
            total = f" of {record.last_step}" if record is not None and record.last_step else ""
            step = "" if status.step is None else f" (step {status.step}{total})"
            is_batch = status.dir.is_batch
            remedy = "To train longer, increase max_steps or max_epochs and submit the script"
            remedy = "To run the script again, submit it" if is_batch else remedy
            raise SpecError(
                f"Run {status.run_id} is complete{step}. {remedy} with --run-dir "
                f"{short_path(status.run_dir)}."
            )


def resubmission(
    ctx: click.Context, spec: Mapping[str, Any], run: RunDir, options: Sequence[str], *, started: bool = True
) -> click.Context:
    """Return the context of a submission that continues a run with changed options, arguments or program."""
    from hpctrain.cli import submit

    call = _program(spec)
    called = f"`{program_name()} {ctx.command_path.partition(' ')[2]}`"
    alone = click.Context(submit.command, info_name="submit", **submit.command.context_settings)
    with suppress(click.NoSuchOption):  # reported below
        end = list(options).index("--") if "--" in options else len(options)
        values, _, _ = submit.command.make_parser(alone).parse_args(list(options[:end]))
        if isinstance(values.get("script"), str):  # a `--` is an argument of the script
            args = values.get("args")
            start = end - (len(args) if isinstance(args, list | tuple) else 0) - 1
            options, call = options[:start], [*options[start:]]
        elif "--" in options:
            options, words = options[:end], options[end + 1 :]
            is_command = spec.get("program") == "command" and words[:1] == (spec["script"],)
            call = ["--", *words] if is_command else [*_program({**spec, "args": ()}), *words]
        keys = [text.partition("=")[0] for text in values.get("assignments") or ()]
        if isinstance(values.get("run_dir"), str) or {"run_dir", "runs_dir"}.intersection(keys):
            raise SpecError(
                f"{called} continues run {run.run_id} in its folder, so --run-dir cannot be changed. Remove "
                "it, or use `hpctrain submit` for a new run."
            )
        if (run.sweep.exists() or spec.get("array") is not None) and call != _program(spec):
            raise SpecError(
                f"{called} continues the tasks of {run.run_id} with their program and arguments, and accepts "
                "only options. Submit a new array for others."
            )
    arguments = [*options, f"--run-dir={run.path.absolute()}", *call]
    context = submit.command.make_context("submit", arguments, parent=ctx.parent)
    context.meta[submit.PREVIOUS] = previous_values(
        repeated_options(spec, started=started), _batch_directives(spec, started=started)
    )
    return context


def resubmit_command(spec: Mapping[str, Any]) -> list[str]:
    """Return shell lines that submit a script again in a new run folder; empty without script or folder."""
    if not isinstance(spec.get("script"), str) or not isinstance(workdir := spec.get("workdir"), str):
        return []
    copy = _mapping(spec.get("code")).get("copy")
    # A checkout can be used instead of the copy.
    comments = [f"# The code that ran: {' '.join(str(copy).split())}"] if copy else []
    options = as_arguments(repeated_options(spec))
    options += (
        f"--{name}={value}" if value else f"--{name}" for name, value in _batch_directives(spec).items()
    )
    command_line = ["hpctrain", "submit", *options, *_program(spec)]
    return [*comments, f"cd {shlex.quote(workdir)}", shlex.join(command_line)]


def _batch_directives(spec: Mapping[str, Any], *, started: bool = True) -> dict[str, str]:
    """Return the request of a batch script, which is passed to sbatch unchanged; empty for other programs."""
    if spec.get("program") != "batch":
        return {}
    directives = dict(_pairs(spec.get("directives")))
    return directives_after_start(directives) if started else directives


def _program(spec: Mapping[str, Any]) -> list[str]:
    """Return the script with its arguments, as on the command line."""
    marks = {"module": ["-m"], "command": ["--"]}.get(str(spec.get("program")), [])
    return [*marks, str(spec["script"]), *_texts(spec.get("args"))]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return options as arguments of `hpctrain submit`."""
    arguments: list[str] = []
    for name, value in options.items():
        option = all_options()[name]
        if name == "sbatch":
            arguments += (_directive(key, text) for key, text in _pairs(value))
        elif option.kind.pairs:
            arguments += (f"{option.flag}={key}={text}" for key, text in _pairs(value))
        elif not option.on_command_line:
            arguments.append(f"--set={name}={','.join(value) if option.kind.many else value}")
        elif option.kind.many:
            arguments += (f"{option.flag}={text}" for text in value)
        elif option.kind.flag:
            arguments.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            arguments.append(f"{option.flag}={value}")
    return arguments


def repeated_options(spec: Mapping[str, Any], *, started: bool = True) -> dict[str, Any]:
    """Return the options that differ from the defaults; if started, without those that delay the start."""
    values = {}
    for name, value in _values(spec, started=started).items():
        option = all_options()[name]
        if option.kind.many:
            value = _texts(value)
        is_of_batch = spec.get("program") == "batch" and name in _OF_DIRECTIVES
        if value not in (None, "", [], option.default) and not is_of_batch:
            values[name] = value
    return values


def _values(spec: Mapping[str, Any], *, started: bool) -> dict[str, Any]:
    nodes, min_nodes, limit_s = spec.get("nodes") or 1, spec.get("min_nodes"), spec.get("time_limit_s")
    gpus, gpu_type = spec.get("gpus_per_node"), spec.get("gpu_type")
    tasks, lead_s = spec.get("ntasks_per_node"), spec.get("stop_before_limit_s")
    shell, torchrun, container, notify, code, directives = (
        _mapping(spec.get(name))
        for name in ("shell", "torchrun", "container", "notify", "code", "directives")
    )
    limit = limit_s if is_finite(limit_s) else None
    if started:
        directives = directives_after_start(directives)
    return {
        "nodes": f"{min_nodes}:{nodes}" if min_nodes and min_nodes != nodes else str(nodes),
        "gpus_per_node": f"{gpu_type}:{gpus}" if gpus and gpu_type else gpus,
        "ntasks_per_node": tasks if tasks != (gpus or 1) else None,
        **{name: spec.get(name) for name in ("array", "template", "backend", "name", "env", "checkpoints")},
        "time": format_time_limit(limit)
        if limit is not None or limit_s == math.inf
        else directives.get("time"),
        **{
            option: "never" if field in _NEVER and spec.get(field, "") is None else spec.get(field)
            for field, option in SPEC_FIELDS.items()
        },
        "stop_before_limit": lead_s if lead_s != default_stop_before_limit_s(limit) else None,
        "restart_policy": {
            f"{kind}.{name}": value
            for kind, changes in _mapping(spec.get("restart_policy")).items()
            for name, value in _pairs(changes)
        },
        "sbatch": {name: value for name, value in directives.items() if name != "time"},
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
    is_named = name.replace("-", "_") in SBATCH_OPTIONS
    is_flag = is_named and (name in SBATCH_FLAGS) != bool(value)
    option = f"--{name}" if is_flag else f"--sbatch={name}"
    return f"{option}={value}" if value else option


def _texts(values: object) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list | tuple) else []


def _pairs(values: object) -> Iterator[tuple[str, str]]:
    yield from ((str(name), str(value)) for name, value in _mapping(values).items())


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
