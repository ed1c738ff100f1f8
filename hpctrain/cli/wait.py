"""Wait until runs have ended (`hpctrain wait`)."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.common import (
    describe_end,
    echo_documents,
    echo_log,
    exit_for,
    json_option,
    open_run,
    runs_argument,
)

if TYPE_CHECKING:
    from hpctrain.jobs.runs.run_status import RunStatus


@click.command("wait")
@runs_argument
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
    runs: tuple[str, ...],
    runs_dir: Path,
    timeout: float | None,
    unknown_limit: float | None,
    as_json: bool,
) -> None:
    """Wait until every RUN ends. Exits with 0 if all completed, 4 if not, and 1 after --timeout.

    Exits with 3 if the state of RUN is unknown for longer than --unknown-limit.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    statuses: list[RunStatus] = []
    for run in [open_run(name, runs_dir) for name in runs]:
        remaining_s = timeout if deadline is None or not statuses else max(0.0, deadline - time.monotonic())
        status = run.wait_for_end(remaining_s, unknown_limit, report=partial(click.echo, err=True))
        statuses.append(status)
        if not as_json:
            echo_log(describe_end(status))
    if as_json:
        echo_documents([asdict(status) for status in statuses])
    for status in statuses:
        exit_for(status)
