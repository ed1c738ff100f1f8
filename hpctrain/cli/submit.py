"""`hpctrain submit`: from a script to a job."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.common import echo_json, handle_of, json_option, program, short_path
from hpctrain.errors import SchedulerError
from hpctrain.jobs.config import COMMAND_LINE, resolve
from hpctrain.jobs.option import Option
from hpctrain.jobs.options import options
from hpctrain.jobs.prepare import Submission, prepare

if TYPE_CHECKING:
    from hpctrain.jobs.runs import Run


def heading(param: click.Parameter) -> str:
    """The heading under which an option of `submit` is shown."""
    known = options()
    return known[param.name].group if param.name in known else "This submission"


class _Submit(click.Command):
    """Shows its options in groups, as the table has them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for title, members in groupby(params, heading):
            with formatter.section(title):
                formatter.write_dl([row for param in members if (row := param.get_help_record(ctx))])


def _click_option(option: Option) -> click.Option:
    """The option on the command line. Values stay texts: they are read as those of files are."""
    text = option.about.help + (f"  [default: {option.default}]" if option.default else "")
    if option.kind.flag:
        return click.Option([f"{option.flag}/--no-{option.flag[2:]}"], default=None, help=text)
    if option.kind.pairs:
        callback = _directives if option.name == "sbatch" else _pairs
        return click.Option(
            [option.flag],
            multiple=True,
            callback=callback,
            metavar=option.metavar,
            help=f"{text} May be repeated.",
        )
    if option.kind.many:
        return click.Option(
            [option.flag],
            multiple=True,
            callback=lambda ctx, param, values: list(values) or None,  # noqa: ARG005
            metavar=option.metavar,
            help=f"{text} May be repeated.",
        )
    return click.Option([option.flag], metavar=option.metavar, help=text)


def _pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:  # noqa: ARG001
    """Read KEY=VALUE; the last of a key counts."""
    pairs = {}
    for value in values:
        key, equals, rest = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not of the form KEY=VALUE.")
        pairs[key] = rest
    return pairs


def _directives(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE, or KEY alone for a flag; dashes before the key are no part of it."""
    named = [value.lstrip("-") for value in values]
    return _pairs(ctx, param, [value if "=" in value else f"{value}=" for value in named])


@click.command("submit", cls=_Submit, context_settings={"allow_interspersed_args": False})
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any option by its name in files; wins over all else. KEY= takes back what a file says. May be "
    "repeated.",
)
@click.option(
    "--explain", is_flag=True, help="Print the value of each option and where it was given, and do nothing."
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the batch script that would be submitted, and do nothing; 3 where Slurm would refuse it.",
)
@click.option(
    "--follow",
    is_flag=True,
    help="Stream rank 0's log, of a job array each task's, until all has ended; Ctrl-C only stops looking.",
)
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    script: str,
    args: tuple[str, ...],
    assignments: tuple[str, ...],
    explain: bool,
    dry_run: bool,
    follow: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Submit SCRIPT as a run; ARGS reach it untouched."""
    if dry_run and (as_json or explain):
        what = "--json a JSON document" if as_json else "--explain a table"
        raise click.UsageError(f"--dry-run prints a shell script and {what}: give one of them.")
    # Click's options are named as the fields of SubmitOptions.
    where: Any = {
        "source": COMMAND_LINE,
        "assignments": assignments,
        "environ": os.environ,
        "cwd": Path.cwd(),
    }
    if explain:
        from hpctrain.cli.explain import show

        show(resolve(asked, **where), as_json=as_json)  # type: ignore[arg-type]
        return
    submission = prepare(script, args, asked, python=sys.executable, **where)  # type: ignore[arg-type]
    _say(submission.notes)
    if dry_run:
        _say(submission.prospects)
        click.echo(submission.script, nl=False)
        if words := submission.refusal():
            raise SchedulerError(f"Slurm would not take this job: {words}. Change what it names.")
        return
    from hpctrain.jobs.submit import hand_over

    run = hand_over(submission)
    _say(submission.prospects)
    _report(run, submission, follow=follow, as_json=as_json)


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def _report(run: Run, submission: Submission, *, follow: bool, as_json: bool) -> None:
    """Say what was submitted, and look at it where that is asked for."""
    run_dir, backend = submission.spec.run_dir, submission.backend.name
    tasks = submission.spec.tasks()
    if as_json:
        facts = {"run_id": run.run_id, "job_id": run.job_id, "run_dir": run_dir, "backend": backend}
        echo_json(facts | ({"tasks": [task.array_task for task in tasks]} if tasks else {}))
    else:
        click.echo(
            f"Run {run.run_id}: job {run.job_id} ({backend}), folder {short_path(run_dir)}", err=follow
        )
    if follow:
        from hpctrain.cli.stream import stream

        stream(run, whole=True, text_to_stderr=as_json)
    elif not as_json:
        handle = handle_of(run_dir)
        next_commands = (f"logs -f {handle}", f"status {handle}", f"cancel {handle}")
        click.echo("Next: " + "  |  ".join(f"{program()} {command}" for command in next_commands))


command.params[:0] = map(_click_option, options().values())
