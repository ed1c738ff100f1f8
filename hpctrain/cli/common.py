"""What several commands share: the argument RUN, `--json`, and how a run is spoken of."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.errors import RunFailed
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.jobs.runs import Run
    from hpctrain.jobs.status import RunStatus

_Function = TypeVar("_Function", bound=Callable[..., Any])

runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder in which run ids are looked up.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)


def run_argument(function: _Function) -> _Function:
    """Give a command the argument RUN and the option `--runs-dir`."""
    return click.argument("run", metavar="RUN")(runs_dir_option(function))


def open_run(run: str, runs_dir: Path) -> Run:
    """The run that the user names.

    Raises:
        RunNotFound: there is none.
    """
    from hpctrain.jobs.runs import find_run

    return find_run(run, runs_dir, os.environ)


def echo_json(document: Any) -> None:
    """Print a JSON document."""
    click.echo(json_text(document))


def json_text(document: Any, default: Callable[[Any], object] | None = None) -> str:
    """A JSON document, in which a number that JSON does not know is a text, such as `"NaN"`.

    `default` makes something of what JSON does not know otherwise.
    """
    return json.dumps(json.loads(json.dumps(document, default=default), parse_constant=str), indent=2)


def handle_of(run_dir: str) -> str:
    """What to type for a run: its id where that is enough, else its folder."""
    run = RunDir(Path(run_dir))
    folder = (run.array or run).path
    known = folder.parent == Path.cwd() / "runs"
    handle = run.run_id if known else short_path(run.path)
    # A word that begins with a dash would be taken for an option.
    return shlex.quote(short_path(run.path) if handle.startswith("-") else handle)


def short_path(path: Path | str) -> str:
    """The path as seen from here, where that is shorter."""
    try:
        short = str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
    return f"./{short}" if short.startswith("-") else short


def describe_state(status: RunStatus) -> str:
    """The state, with what the scheduler says of it."""
    from hpctrain.jobs.doubt import unknown_for

    # A folder without a submission has no state that somebody could know.
    if status.unknown_s is not None:
        return f"{status.state}: {unknown_for(status)}"
    return str(status.state) + (f" ({status.words})" if status.words else "")


def one_line(text: str) -> str:
    """A text of a run in one line, without anything in it that a terminal would obey."""
    from hpctrain.telemetry.report.words import plain

    return plain(" ".join(text.split()))


def describe_end(status: RunStatus) -> str:
    """What became of an ended run, where its files lie and what to type next."""
    from hpctrain.jobs.error_report import end_of_job_log

    run = RunDir(Path(status.run_dir))
    handle = handle_of(status.run_dir)
    lines = []
    if status.cause:
        lines += [
            f"cause        {one_line(status.cause)}",
            f"log          {short_path(status.log or run.logs)}",
        ]
        lines += [f"             {line}" for line in _traceback(run) or end_of_job_log(status.log)]
    step = f", step {status.step}" if status.step is not None else ""
    loss = f", loss {status.loss:.6g}" if status.loss is not None else ""
    counts = f", {status.words}" if status.tasks is not None else ""
    lines += [f"run          {status.run_id}: {status.state}{counts}{step}{loss}"]
    # A script that does not train with hpctrain leaves its own files instead.
    files = {"results": run.metrics, "logs": run.logs, "checkpoints": run.checkpoints}
    if run.tasks():
        # Those of an array lie in the folders of its tasks.
        lines += [f"{'tasks':<12} {short_path(run.path)}/task-*"]
    else:
        lines += [f"{what:<12} {short_path(path)}" for what, path in files.items() if path.exists()]
    if tasks := [run.task(index) for index in run.tasks()]:
        # The log that is named is that of the task that failed.
        told = (task for task in tasks if Path(status.log or "/").is_relative_to(task.path))
        handle = handle_of(str(next(told, tasks[0]).path))
    lines += [
        f"next         {program()} status {handle}  |  {program()} logs {handle}",
    ]
    return "\n".join(lines)


def _traceback(run: RunDir) -> list[str]:
    """Where the run failed, in the words of the rank that did so first."""
    from hpctrain.jobs.error_report import failures_since_submission, traceback_of

    failures = [its for its in failures_since_submission(run.read_events()) if its.get("rank") is not None]
    # The last line is the cause, which is told already.
    return traceback_of(run, failures[-1])[:-1] if failures else []


def leave_with(status: RunStatus) -> None:
    """End the program with the exit code of an ended run, where it failed; why has been said."""
    from hpctrain.jobs.states import RunState

    if status.state is not RunState.COMPLETED:
        sys.exit(RunFailed.exit_code)


def program() -> str:
    """What to type for `hpctrain`: its name where the shell finds it, else the path it was called by."""
    called, found = Path(sys.argv[0]), shutil.which("hpctrain")
    if called.name != "hpctrain" or (found is not None and Path(found).samefile(called)):
        return "hpctrain"
    return shlex.quote(short_path(called.absolute()))
