"""`hpctrain wait`: wait until a run has ended."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from hpctrain.cli.common import (
    describe_end,
    echo_json,
    echo_log,
    exit_for,
    json_option,
    open_run,
    run_argument,
)


@click.command("wait")
@run_argument
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="S", help="Maximum time to wait, in seconds."
)
@click.option(
    "--unknown-limit",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Maximum time to wait while the state of RUN is unknown and RUN writes nothing, in seconds.  "
    "[default: 3600]",
)
@json_option
def command(
    run: str, runs_dir: Path, timeout: float | None, unknown_limit: float | None, as_json: bool
) -> None:
    """Wait until RUN ends. Exits with 0 if RUN completed, 4 if not, and 1 after --timeout.

    Exits with 3 if the state of RUN is unknown for longer than --unknown-limit.
    """
    found = open_run(run, runs_dir)
    status = found.wait_for_end(timeout, unknown_limit, report=partial(click.echo, err=True))
    if as_json:
        echo_json(asdict(status))
    else:
        echo_log(describe_end(status))
    exit_for(status)
