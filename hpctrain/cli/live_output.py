"""Live output of a run on the terminal, until it ends or the user detaches."""

from __future__ import annotations

import sys

import click

from hpctrain.cli.common import describe_end, echo_log, exit_for, program_name, run_reference
from hpctrain.jobs.runs.follow import follow_run
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import EventLine, LogFilter, LogText

_INTERRUPTED = 130


#: All ranks print nearly the same output; the other logs can be read later.
_RANK_0 = LogFilter(ranks=(0,))


def stream_run(run: Run, shown: LogFilter = _RANK_0, *, whole: bool, text_to_stderr: bool = False) -> None:
    """Stream the log to stdout and events to stderr, then print the result of the run.

    Exits with the code of the run's result.
    """
    status, explained = None, False
    try:
        for item in follow_run(run, shown, whole=whole):
            match item:
                case LogText(text):
                    echo_log(text, nl=False, err=text_to_stderr)
                case EventLine(line, details):
                    echo_log("\n   ".join([f"== {line}", *details]), err=True)
                    explained |= bool(details)
                case _:
                    status = item
    except KeyboardInterrupt:
        handle = run_reference(str(run.dir.path))
        click.echo(
            f"\nDetached; the run continues. Follow it again: {program_name()} logs -f {handle}  |  "
            f"cancel it: {program_name()} cancel {handle}",
            err=True,
        )
        sys.exit(_INTERRUPTED)
    assert status is not None, "follow() ends with a status"
    echo_log(describe_end(status, with_traceback=not explained), err=True)
    exit_for(status)
