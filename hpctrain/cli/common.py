"""Shared parts of the commands: arguments, output, and the summary of a run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from hpctrain.errors import RunFailed, RunNotFound
from hpctrain.remote.protocol import CLUSTER_VARIABLE
from hpctrain.rundir import RunDir
from hpctrain.text import format_count, format_number, printable, without_escapes

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run import Run
    from hpctrain.jobs.runs.run_status import RunStatus

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Exit code after Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT

#: Key of the context: the folder that `--runs-dir` names.
_RUNS_DIR = "hpctrain.runs_dir"


def _runs_dir_option(**settings: Any) -> Callable[[_Function], _Function]:
    text = "Parent folder of the run folders."
    kind = click.Path(path_type=Path)
    return click.option("--runs-dir", type=kind, default=Path("runs"), help=text, **settings)


runs_dir_option = _runs_dir_option()
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


class DefaultGroup(click.Group):
    """A group that runs the subcommand `default` if the first word is not a subcommand."""

    def __init__(self, *args: Any, default: str, **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [self._default, *args]
        return super().parse_args(ctx, args)


def parse_pairs(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:  # noqa: ARG001
    """Parse the values NAME=VALUE of an option; the last value of a name takes precedence."""
    for text in values:
        name, equals, _ = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not of the form {param.metavar}.")
    return dict(text.split("=", 1) for text in values)


def _keep_runs_dir(ctx: click.Context, _param: click.Parameter, runs_dir: Path) -> None:
    ctx.meta[_RUNS_DIR] = runs_dir


_kept_runs_dir_option = _runs_dir_option(is_eager=True, expose_value=False, callback=_keep_runs_dir)


def run_argument(function: _Function) -> _Function:
    """Add the argument RUN, which is passed as an open run, and the option `--runs-dir` to a command."""
    add = click.argument("run", metavar="RUN", callback=_open_run, shell_complete=complete_runs)
    return add(_kept_runs_dir_option(function))


def _open_run(ctx: click.Context, _param: click.Parameter, run: str) -> Run | None:
    return None if ctx.resilient_parsing else open_run(run, ctx.meta[_RUNS_DIR])


def runs_argument(function: _Function) -> _Function:
    """Add the argument RUN, which may be repeated, and the option `--runs-dir`. See `run_argument`."""
    add = click.argument(
        "runs", metavar="RUN...", nargs=-1, required=True, callback=_open_runs, shell_complete=complete_runs
    )
    return add(_kept_runs_dir_option(function))


def _open_runs(ctx: click.Context, _param: click.Parameter, runs: Sequence[str]) -> list[Run]:
    try:
        return [] if ctx.resilient_parsing else [open_run(run, ctx.meta[_RUNS_DIR]) for run in runs]
    except RunNotFound as error:
        raise RunNotFound(f"{error} Nothing was done." if len(runs) > 1 else str(error)) from error


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete the ids of runs, newest first; if no id matches, complete folders."""
    from hpctrain.jobs.runs.run import list_runs

    runs_dir = ctx.params.get("runs_dir") or ctx.meta.get(_RUNS_DIR) or Path("runs")
    runs = list_runs(runs_dir, os.environ)
    names = [run.run_id for run in reversed(runs) if run.run_id.startswith(incomplete)]
    return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="dir")]


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    return [CompletionItem(incomplete, type="file")]


def open_run(run: str, runs_dir: Path) -> Run:
    """Return the run that the user names, or raise `RunNotFound`."""
    from hpctrain.jobs.runs.run import find_run

    try:
        return find_run(run, runs_dir, os.environ)
    except RunNotFound:
        if os.path.isfile(run):
            raise RunNotFound(
                f"{run} is a file, not a run. To submit it: hpctrain submit {shlex.quote(run)}"
            ) from None
        raise


def walk_commands(
    group: click.Group, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Context]]:
    """Yield all commands, including groups and their subcommands, by name in the order of the help."""
    context = click.Context(group, parent, group.name if parent else "hpctrain", show_default=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, click.Context(command, context, name)
        if isinstance(command, click.Group):
            for inner_name, inner_context in walk_commands(command, context):
                yield f"{name} {inner_name}", inner_context


def echo_documents(documents: Sequence[Any]) -> None:
    """Print the JSON document of the only run, or a list with that of each run."""
    echo_json(documents[0] if len(documents) == 1 else documents)


def echo_json(document: Any) -> None:
    click.echo(json_text(document))


def echo_table(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> None:
    """Print rows in columns. The last column is always aligned left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join([*map(justify, row[:-1], widths), row[-1]]).rstrip())


def json_text(document: Any, default: Callable[[Any], object] | None = None) -> str:
    """Return a JSON document; numbers that JSON does not support become strings, such as `"NaN"`."""
    return json.dumps(json.loads(json.dumps(document, default=default), parse_constant=str), indent=2)


def run_reference(run_dir: str) -> str:
    """Return the argument RUN for a run: its id if that is sufficient, otherwise its folder."""
    run = RunDir(Path(run_dir))
    is_found_by_id = (run.array or run).path.parent == Path.cwd() / "runs"
    # An argument that begins with a dash would be parsed as an option.
    use_id = is_found_by_id and not run.run_id.startswith("-")
    return shlex.quote(run.run_id if use_id else short_path(run.path))


def short_path(path: Path | str) -> str:
    try:
        short = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
    return f"./{short}" if short.startswith("-") else short


def describe_state(status: RunStatus) -> str:
    from hpctrain.jobs.runs.status_poller import describe_unknown

    # The state of a folder without a submission is always unknown.
    if status.unknown_s is not None:
        return f"{status.state}: {describe_unknown(status)}"
    return str(status.state) + (f" ({status.words})" if status.words else "")


def describe_progress(status: RunStatus) -> str | None:
    """Return the last step, or the reason for its absence; None for a job array or before the ranks start."""
    from hpctrain.telemetry.report.metric_curves import describe_step

    if status.attempt is None or status.tasks is not None:
        return None
    return describe_step(status.step, status.reports_steps)


def format_step(status: RunStatus) -> str:
    return "not reported" if status.reports_steps is False else format_count(status.step)


def one_line(text: str) -> str:
    """Return a string from a run as one line, without terminal escape sequences."""
    return printable(" ".join(text.split()))


def echo_log(text: str, *, nl: bool = True, err: bool = False) -> None:
    """Print text from the logs of a run. On a terminal, escape sequences other than colors are removed."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None and stream.isatty():
        text = without_escapes(text)
    click.echo(text, nl=nl, err=err)


def describe_end(status: RunStatus, *, with_traceback: bool = True) -> str:
    """Return the result of an ended run, the location of its files, and the next commands."""
    from hpctrain.jobs.runs.error_report import failures_since_submission, job_log_tail, rank_traceback
    from hpctrain.jobs.runs.run_status import unmatched_pattern

    run = status.dir
    lines: list[tuple[str, str]] = []
    if status.cause:
        lines += [("cause", one_line(status.cause)), ("log", short_path(status.log or run.logs))]
        failures = failures_since_submission(run.read_events()) if with_traceback else []
        failures = [failure for failure in failures if failure.rank is not None]
        trace = rank_traceback(run, failures[-1]) if failures else []
        lines += [("", line) for line in trace or job_log_tail(status.log)]
    step = f", step {progress}" if (progress := describe_progress(status)) else ""
    loss = f", loss {format_number(status.loss)}" if status.loss is not None else ""
    counts = f", {status.words}" if status.tasks is not None else ""
    lines.append(("run", f"{status.run_id}: {status.state}{counts}{step}{loss}"))
    handle = run_reference(status.run_dir)
    if tasks := [run.task(index) for index in run.tasks()]:
        # The files of an array are in the folders of its tasks. The log of the failed task is shown.
        lines.append(("tasks", f"{short_path(run.path)}/task-*"))
        failed = (task for task in tasks if Path(status.log or "/").is_relative_to(task.path))
        handle = run_reference(str(next(failed, tasks[0]).path))
    else:
        # A script that does not use the `Trainer` may not create these files.
        files = {"results": run.metrics, "logs": run.logs, "checkpoints": run.checkpoints}
        lines += [(title, short_path(path)) for title, path in files.items() if path.exists()]
    if status.note:
        lines.append(("note", one_line(status.note)))
    if (tasks or status.attempt is not None) and (problem := unmatched_pattern(run)):
        lines.append(("note", problem))
    lines.append(("next", f"{program_name()} status {handle}  |  {program_name()} logs {handle}"))
    return "\n".join(f"{title:<12} {text}" for title, text in lines)


def exit_for(status: RunStatus) -> None:
    """Exit with an error code if the run did not complete; the cause is already printed."""
    from hpctrain.slurm.states import RunState

    if status.state not in (RunState.COMPLETED, RunState.STOPPED_EARLY):
        sys.exit(RunFailed.exit_code)


def program_name() -> str:
    """Return the command for `hpctrain`, with `--on` if set: its name or its path."""
    context = click.get_current_context(silent=True)
    if cluster := context and context.meta.get(CLUSTER_VARIABLE):
        return f"hpctrain --on {shlex.quote(cluster)}"
    called, on_path = Path(sys.argv[0]), shutil.which("hpctrain")
    if called.name != "hpctrain" or (on_path is not None and Path(on_path).samefile(called)):
        return "hpctrain"
    return shlex.quote(short_path(called.absolute()))
