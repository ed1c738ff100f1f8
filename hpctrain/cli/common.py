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
    click.echo(json.dumps(document, indent=2))


def handle_of(run_dir: str) -> str:
    """What to type for a run: its id where that is enough, else its folder."""
    path = Path(run_dir)
    known = path.parent == Path.cwd() / "runs"
    return shlex.quote(path.name if known else short_path(path))


def short_path(path: Path | str) -> str:
    """The path as seen from here, where that is shorter."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def describe_end(status: RunStatus) -> str:
    """What became of an ended run, where its files lie and what to type next."""
    run = RunDir(Path(status.run_dir))
    handle = handle_of(status.run_dir)
    lines = []
    if status.cause:
        lines += [f"cause        {status.cause}", f"log          {short_path(status.log or run.logs)}"]
    step = f", step {status.step}" if status.step is not None else ""
    loss = f", loss {status.loss:.6g}" if status.loss is not None else ""
    lines += [f"run          {status.run_id}: {status.state}{step}{loss}"]
    # A script that does not train with hpctrain leaves its own files instead.
    files = {"results": run.metrics, "logs": run.logs, "checkpoints": run.checkpoints}
    lines += [f"{what:<12} {short_path(path)}" for what, path in files.items() if path.exists()]
    lines += [
        f"next         {program()} status {handle}  |  {program()} logs {handle}",
    ]
    return "\n".join(lines)


def program() -> str:
    """What to type for `hpctrain`: its name where the shell finds it, else the path it was called by."""
    called, found = Path(sys.argv[0]), shutil.which("hpctrain")
    if called.name != "hpctrain" or (found is not None and Path(found).samefile(called)):
        return "hpctrain"
    return shlex.quote(short_path(called.absolute()))
