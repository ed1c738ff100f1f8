"""Live output of a run on the terminal, until it ends or the user detaches."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import click

from hpctrain.cli.common import INTERRUPTED, describe_end, echo_log, exit_for, program_name, run_reference
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import EventLine, LogFilter, LogMark, LogPosition, LogText, follow_run
from hpctrain.remote.protocol import RECORD_START, STREAM_VARIABLE

#: All ranks print nearly the same output; the other logs can be read later.
_RANK_0 = LogFilter(ranks=(0,))


def stream_run(run: Run, shown: LogFilter = _RANK_0, *, whole: bool, text_to_stderr: bool = False) -> None:
    """Stream the log to stdout and events to stderr, then print the result of the run.

    Exits with the code of the run's result. For another machine (`--on`), the output consists of records
    (see `LogStream`), and continues at the position that stdin names.
    """
    status, explained = None, False
    handle = run_reference(str(run.dir.path))
    detached = (
        f"\nDetached. The run continues. Follow it again: {program_name()} logs -f {handle}  |  "
        f"cancel it: {program_name()} cancel {handle}"
    )
    show, positions, to_stderr = _print, None, text_to_stderr
    if click.get_current_context().meta.get(STREAM_VARIABLE):
        show, start = _send, json.loads(sys.stdin.readline())
        threading.Thread(target=_exit_with_reader, daemon=True).start()
        whole, to_stderr = start.get("whole", whole), start.get("to_stderr", to_stderr)
        positions = {
            source: LogPosition.from_json(position) for source, position in start["positions"].items()
        }
        follow = ["logs", "-f", str(run.dir.path), *(f"--rank={rank}" for rank in shown.ranks)]
        follow += ["--errors"] * shown.errors + [f"--attempt={shown.attempt}"] * (shown.attempt is not None)
        show("follow", {"args": follow, "whole": whole, "to_stderr": to_stderr, "detached": detached})
    try:
        for item in follow_run(run, shown, whole=whole, positions=positions):
            match item:
                case LogText(text, mark):
                    show("err" if to_stderr else "out", text, mark)
                case EventLine(line, details, mark):
                    show("err", "\n   ".join([f"== {line}", *details]) + "\n", mark)
                    explained |= bool(details)
                case LogMark():
                    show("out", "", item)
                case _:
                    status = item
    except KeyboardInterrupt:
        click.echo(detached, err=True)
        sys.exit(INTERRUPTED)
    assert status is not None, "follow() ends with a status"
    show("err", describe_end(status, with_traceback=not explained) + "\n")
    exit_for(status)


def _print(kind: str, content: Any, mark: LogMark | None = None) -> None:  # noqa: ARG001
    echo_log(content, nl=False, err=kind == "err")


def _send(kind: str, content: Any, mark: LogMark | None = None) -> None:
    click.echo(RECORD_START + json.dumps([kind, content, mark]))


def _exit_with_reader() -> None:
    """Exit when the other machine disconnects: a run that prints nothing would not notice it."""
    sys.stdin.read()
    os._exit(1)
