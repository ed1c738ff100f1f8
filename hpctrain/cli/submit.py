"""`hpctrain submit`: submit a script as a job."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from copy import copy
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpctrain.cli.common import (
    complete_files,
    echo_json,
    echo_table,
    json_option,
    parse_pairs,
    program_name,
    run_reference,
    short_path,
)
from hpctrain.jobs.options.batch_options import BatchScript
from hpctrain.jobs.options.find_replacement import find_replacement
from hpctrain.jobs.options.option import DEFAULT_SOURCE, Option, OptionValue
from hpctrain.jobs.options.option_parser import option_names
from hpctrain.jobs.options.option_table import all_options
from hpctrain.jobs.options.resolved_options import COMMAND_LINE_SOURCE, ResolvedOptions, resolve_options
from hpctrain.jobs.submit.prepare import PreparedSubmission, prepare_submission
from hpctrain.jobspec.launcher import ProgramKind
from hpctrain.remote.protocol import CLUSTER_VARIABLE
from hpctrain.slurm.sbatch_options import (
    BATCH_OPTIONS,
    SBATCH_FLAGS,
    SBATCH_OPTIONAL_VALUES,
    SBATCH_OPTIONS,
    SHORT_NAMES,
)
from hpctrain.text import suggest

#: Key of the context: true if the program follows a `--`.
_IS_COMMAND = "hpctrain.is_command"
#: Heading of the options that are passed to sbatch.
SBATCH_HEADING = "Options of sbatch"
#: Options of sbatch whose value may be omitted, with the form of a value.
_OPTIONAL_VALUES = {"--nice": r"[+-]?\d+", "--get-user-env": r"\d*[SL]?", "--propagate": r"[A-Z,]+"}
#: Key of the context: the options of the submission that this one repeats.
PREVIOUS = "hpctrain.previous"


def heading(param: click.Parameter) -> str:
    if isinstance(param, _SbatchOption):
        return SBATCH_HEADING
    option = all_options().get(str(param.name))
    return "This submission" if option is None else option.group


class SubmitCommand(click.Command):
    """A command with the options of a submission, grouped in sections in its help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            # The parser drops the `--` before a command. A `--` after the script is an argument of the
            # script.
            with suppress(click.UsageError):
                before, _, _ = self.make_parser(ctx).parse_args(args[: args.index("--")])
                ctx.meta[_IS_COMMAND] = not isinstance(before.get("script"), str)
        try:
            rest = super().parse_args(ctx, args)
            given = [param for param in self.params if ctx.params.get(str(param.name)) is not None]
            if (param := next((param for param in given if param.name in BATCH_OPTIONS), None)) and (
                batch_script(ctx) is None
            ):
                raise click.NoSuchOption(param.opts[-1], ctx=ctx)
            return rest
        except click.NoSuchOption as error:
            name = error.option_name
            hint = f"{find_replacement(name)}."
            if hint == ".":
                params = [param for param in self.params if param.name not in BATCH_OPTIONS]
                names = [opt[2:] for param in params for opt in param.opts if opt.startswith("--")]
                hint = suggest(name.lstrip("-"), names, otherwise="").replace(" '", " '--")
            hint = hint or "`hpctrain submit --help` lists the options."
            raise click.UsageError(f"No such option {name!r}. {hint}", ctx) from None
        except click.BadOptionUsage as error:
            name = error.option_name[2:]
            if name not in SBATCH_OPTIONAL_VALUES:
                raise
            hint = f"Use --sbatch {name}=VALUE to pass a value to sbatch."
            raise click.UsageError(f"{error.message} {hint}", ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for title, members in groupby(params, heading):
            with formatter.section(title):
                formatter.write_dl([row for param in members if (row := param.get_help_record(ctx))])
                if title == SBATCH_HEADING:
                    formatter.write_paragraph()
                    formatter.write_text(describe_sbatch_options())


class HiddenSubmitOptions(SubmitCommand):
    """A command that accepts options of a submission, which only the help of `submit` lists."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Command.format_options(self, ctx, formatter)


class _SbatchOption(click.Option):
    """An option that is passed to sbatch. The help lists only its name."""

    def get_help_record(self, ctx: click.Context) -> None:  # noqa: ARG002
        return None


def describe_sbatch_options() -> str:
    params = [param for param in command.params if isinstance(param, _SbatchOption)]
    names, of_batch = (
        [", ".join(param.opts) for param in params if (param.name in BATCH_OPTIONS) is is_of_batch]
        for is_of_batch in (False, True)
    )
    return (
        f"Passed to sbatch unchanged, as sbatch(1) describes them: {', '.join(names)}. Only with a batch "
        f"script: {', '.join(of_batch)}."
    )


def _complete_value(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a fixed choice or a path."""
    option = all_options()[str(param.name)]
    if option.is_path:
        return complete_files(ctx, param, incomplete)
    return [CompletionItem(choice) for choice in option.kind.choices if choice.startswith(incomplete)]


def _sbatch_option(name: str, long_name: str) -> _SbatchOption:
    short_names = [f"-{short}" for short, long in SHORT_NAMES.items() if long == long_name]
    names = [name, *short_names, f"--{long_name}"]
    if name != "requeue" and long_name not in SBATCH_FLAGS:
        return _SbatchOption(names, callback=_optional_value)
    return _SbatchOption([name, *short_names, f"--{long_name}/--no-{long_name}"], default=None)


def _optional_value(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:  # noqa: ARG001
    """Reject a value that is probably the script: without `=`, sbatch reads no value after these options."""
    flag = param.opts[-1]
    if value is not None and (pattern := _OPTIONAL_VALUES.get(flag)) and not re.fullmatch(pattern, value):
        raise click.BadParameter(
            f"{value!r} is not a value of {flag}. Write {flag}=VALUE, or --sbatch {flag[2:]} without a value."
        )
    return value


def _click_option(option: Option) -> click.Option:
    """Return the command-line option. Values remain strings, and are parsed like values from files."""
    names = [option.name, option.flag, *([option.short] if option.short else [])]
    text = option.help + (f"  [default: {option.default_text}]" if option.default_text else "")
    if option.kind.flag:
        names = [option.name, *(f"{name}/--no-{name[2:]}" for name in names[1:])]
        return click.Option(names, default=None, help=text)
    if not (option.kind.pairs or option.kind.many):
        return click.Option(names, metavar=option.metavar, help=text, shell_complete=_complete_value)
    callback: Any = {"sbatch": _directives, "env": _variables}.get(option.name, parse_pairs)
    if option.kind.many:
        callback = lambda _ctx, _param, values: list(values) or None  # noqa: E731
    text = f"{text} Repeatable."
    return click.Option(names, multiple=True, callback=callback, metavar=option.metavar, help=text)


def _variables(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse NAME=VALUE, or NAME for its value in the current environment."""
    inherited = {name: os.environ.get(name) for name in values if name and "=" not in name}
    if missing := [name for name, value in inherited.items() if value is None]:
        name = missing[0]
        if cluster := os.environ.get(CLUSTER_VARIABLE):
            raise click.BadParameter(
                f"{name!r} is not set in a login shell on {cluster}. Export the variable in ~/.bash_profile "
                "there, because --env NAME reads the environment of the cluster."
            )
        raise click.BadParameter(
            f"{name!r} is not set in the environment of this shell. Export the variable, or use "
            f"--env {name}=VALUE."
        )
    pairs = [f"{text}={inherited[text]}" if text in inherited else text for text in values]
    return parse_pairs(ctx, param, pairs)


def _directives(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Parse KEY=VALUE, or KEY for a flag; leading dashes are removed."""
    named = [value.lstrip("-") for value in values]
    return parse_pairs(ctx, param, [value if "=" in value else f"{value}=" for value in named])


@click.command(
    "submit",
    cls=SubmitCommand,
    context_settings={
        "allow_interspersed_args": False,
        # torchrun's options have underscores.
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set an option by its configuration-file name. Overrides all other sources. KEY= removes a "
    "value set in a file. Repeatable.",
)
@click.option(
    "--show-config", is_flag=True, help="Print the value of each option and its source, without submitting."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the batch script without submitting it. Exits with 3 if Slurm would reject the job.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Stream the log of rank 0 (of every task in an array) until the run ends. Ctrl-C detaches.",
)
@json_option
@click.option(
    "-m", "as_module", is_flag=True, help="Run SCRIPT as a module, as `python -m` does: -m package.module."
)
@click.argument("script", shell_complete=complete_files)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_files)
@click.pass_context
def command(ctx: click.Context, /, **params: Any) -> None:
    """Submit SCRIPT as a run. ARGS are passed to it unchanged.

    A batch script keeps its #SBATCH lines, and starts the ranks itself. To submit a module or any other
    command:

    \b
        hpctrain submit [OPTIONS] -m package.module [ARGS]
        hpctrain submit [OPTIONS] -- COMMAND [ARGS]
    """  # noqa: D301
    as_json, dry_run, follow = params["as_json"], params["dry_run"], params["follow"]
    if dry_run and (as_json or params["show_config"]):
        other = "--json a JSON document" if as_json else "--show-config a table"
        raise click.UsageError(f"--dry-run prints a batch script and {other}. Use only one of these options.")
    if params["show_config"]:
        batch = batch_script(ctx)
        header = None if batch is None else batch.options
        settings = resolve_options(_asked(ctx), header=header, **_sources(ctx))
        _print_option_sources(settings, as_json=as_json)
        return
    submission, notes = prepare(ctx, params["args"])
    _print_lines(notes)
    if dry_run:
        _print_lines(submission.forecast)
        click.echo(
            "Nothing was submitted. This script needs the run folder that `hpctrain submit` creates, so it "
            "cannot be submitted on its own.",
            err=True,
        )
        click.echo(submission.script, nl=False)
        submission.raise_refusal("Slurm would reject this job")
        return
    from hpctrain.jobs.submit.submit_prepared import submit_prepared

    run, job_id = submit_prepared(submission)
    _print_lines(submission.forecast)
    run_dir, backend, tasks = submission.spec.run_dir, submission.backend.name, submission.spec.tasks()
    if as_json:
        facts = {"run_id": run.run_id, "job_id": job_id, "run_dir": run_dir, "backend": backend}
        echo_json(facts | ({"tasks": [task.array_task for task in tasks]} if tasks else {}))
    else:
        click.echo(f"Run {run.run_id}: job {job_id} ({backend}), folder {short_path(run_dir)}", err=follow)
    if follow:
        from hpctrain.cli.logs import stream_run

        stream_run(run, whole=True, text_to_stderr=as_json)
    elif not as_json:
        echo_next(run_dir, "logs -f", "status", "cancel")


def prepare(
    ctx: click.Context, args: Sequence[str], *assignments: str
) -> tuple[PreparedSubmission, list[str]]:
    """Prepare the submission of a command's options, and return it with its notes."""
    script, is_command = ctx.params["script"], ctx.meta.get(_IS_COMMAND)
    kind: ProgramKind = "module" if ctx.params["as_module"] else "command" if is_command else "script"
    notes = []
    batch = BatchScript.read(Path.cwd() / script) if is_command and not args else None
    if batch is not None and batch.header.directives:
        notes.append(
            f"Every rank runs {script}, and its #SBATCH lines have no effect. To run it once as a batch "
            f"script, use: {program_name()} submit {shlex.quote(script)}"
        )
    submission = prepare_submission(
        script,
        args,
        _asked(ctx),
        python=sys.executable,
        program=kind,
        dry_run=ctx.params["dry_run"],
        **_sources(ctx, *assignments),
    )
    return submission, [
        *notes,
        *submission.notes,
        *([] if PREVIOUS in ctx.meta else _misplaced_options(script, args)),
    ]


def batch_script(ctx: click.Context) -> BatchScript | None:
    """Return the batch script that the command line submits; None if it submits another program."""
    script = ctx.params.get("script")
    is_script = isinstance(script, str) and not (ctx.params.get("as_module") or ctx.meta.get(_IS_COMMAND))
    return BatchScript.read(Path.cwd() / str(script)) if is_script else None


def _asked(ctx: click.Context) -> Any:
    """Return the values of the command line, by the names of the fields of SubmitOptions."""
    return {
        name: value
        for name, value in ctx.params.items()
        if name in option_names() or (name in BATCH_OPTIONS and value is not None)
    }


def _sources(ctx: click.Context, *assignments: str) -> Any:
    return {
        "source": COMMAND_LINE_SOURCE,
        "assignments": [*ctx.params["assignments"], *assignments],
        "previous": ctx.meta.get(PREVIOUS),
        "environ": os.environ,
        "cwd": Path.cwd(),
    }


def echo_next(run_dir: str, *commands: str) -> None:
    """Print the commands that a user needs next for a run."""
    handle, name = run_reference(run_dir), program_name()
    click.echo("Next: " + "  |  ".join(f"{name} {command} {handle}" for command in commands))


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _print_option_sources(settings: ResolvedOptions, *, as_json: bool) -> None:
    """Print one row per option, or per entry of an option with several entries."""
    rows = _source_rows(settings)
    if as_json:
        echo_json(rows)
        return
    is_set = (row for row in rows if row["value"] is not None or row["default"] is not None)
    echo_table([("option", "value", "source"), *(_cells(row) for row in is_set)])


def _source_rows(settings: ResolvedOptions) -> list[dict[str, Any]]:
    """Return the rows in order. The row of an unset option has the default as text, and no value."""
    rows = []
    for name, option in all_options().items():
        keys = sorted(key for key in settings.values if key == name or key.startswith(f"{name}."))
        for key in keys or [name]:
            setting = settings.values.get(key, OptionValue(key, None, DEFAULT_SOURCE))
            source = setting.source
            # In a file, options of sbatch need no prefix.
            short_key = key.removeprefix("sbatch.").replace("-", "_")
            rows.append(
                {
                    "option": short_key if short_key in (*SBATCH_OPTIONS, *BATCH_OPTIONS) else key,
                    "value": setting.value,
                    "default": option.default_text or None,
                    "source": source.words or "file",
                    "file": str(source.path) if source.path else None,
                    "line": source.line or None,
                    "profile": source.profile,
                }
            )
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    value, source = row["value"], str(row["source"])
    if value is None:
        text = f"({row['default']})"
    else:
        text = value if isinstance(value, str) and value.isprintable() and value else json.dumps(value)
    if row["file"] is not None:
        profile = f" (profile {row['profile']})" if row["profile"] else ""
        source = f"{short_path(row['file'])}:{row['line']}{profile}"
    return row["option"], text, source


def _options() -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


def hidden_options(excluded: Collection[str]) -> list[click.Parameter]:
    """Return the options of `submit` for a command that does not list them in its help."""
    params: list[click.Parameter] = [copy(param) for param in _options() if param.name not in excluded]
    for param in params:
        param.hidden = True  # type: ignore[attr-defined]
    return params


def _misplaced_options(script: str, args: Sequence[str]) -> list[str]:
    """Return a note for each argument of the script that is probably an option of `submit`."""
    try:
        source = Path(script).read_text(errors="replace")
    except (OSError, ValueError):
        return []  # a module or a command
    flags = {name for param in _options() for name in param.opts if name.startswith("--")}
    return [
        f"Note: {name} is passed to {Path(script).name}. Put options of hpctrain before the script."
        for name in dict.fromkeys(arg.partition("=")[0] for arg in args)
        if name in flags and name[2:].replace("-", "_") not in source.replace("-", "_")
    ]


_params = [_click_option(option) for option in all_options().values() if option.on_command_line]
# The options of sbatch belong to the section of --sbatch.
_end = next(i for i, param in enumerate(_params, 1) if param.name == "sbatch")
_params[_end:_end] = [_sbatch_option(*names) for names in (SBATCH_OPTIONS | BATCH_OPTIONS).items()]
command.params[:0] = _params
