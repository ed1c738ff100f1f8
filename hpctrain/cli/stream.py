"""A run on the terminal as it happens, until it has ended or the user looks away."""

from __future__ import annotations

import sys

import click

from hpctrain.cli.common import describe_end, handle_of, leave_with, program
from hpctrain.jobs.follow import follow
from hpctrain.jobs.reading import Notice, Shown, Text
from hpctrain.jobs.runs import Run

_INTERRUPTED = 130


#: Ranks print much the same, and all of it may be looked up.
_RANK_0 = Shown(ranks=(0,))


def stream(run: Run, shown: Shown = _RANK_0, *, whole: bool, text_to_stderr: bool = False) -> None:
    """Print the log as it comes and the run's turns on stderr, then what became of the run.

    Ends the program with the exit code that says whether the run succeeded.
    """
    status = None
    try:
        for item in follow(run, shown, whole=whole):
            match item:
                case Text(text):
                    click.echo(text, nl=False, err=text_to_stderr)
                case Notice(line):
                    click.echo(f"== {line}", err=True)
                case _:
                    status = item
    except KeyboardInterrupt:
        handle = handle_of(str(run.dir.path))
        click.echo(
            f"\nNot looking any more; the run goes on. Look again: {program()} logs -f {handle}  |  "
            f"end it: {program()} cancel {handle}",
            err=True,
        )
        sys.exit(_INTERRUPTED)
    assert status is not None, "follow() ends with a status"
    click.echo(describe_end(status), err=True)
    leave_with(status)
