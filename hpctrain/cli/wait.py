"""`hpctrain wait`: until a run has ended."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

import click

from hpctrain.cli.common import describe_end, echo_json, json_option, leave_with, open_run, run_argument


@click.command("wait")
@run_argument
@click.option("--timeout", type=click.FloatRange(min=0), metavar="S", help="Seconds to wait at most.")
@click.option(
    "--unknown-limit",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds to wait at most while Slurm gives no sure answer and RUN writes nothing.  [default: 3600]",
)
@json_option
def command(
    run: str, runs_dir: Path, timeout: float | None, unknown_limit: float | None, as_json: bool
) -> None:
    """Wait until RUN has ended: exit code 0 after success, 4 after anything else, 1 after --timeout.

    Where nobody can say for too long where it stands, exit code 3: see --unknown-limit.
    """
    found = open_run(run, runs_dir)
    status = found.wait_for_end(timeout, unknown_limit, tell=partial(click.echo, err=True))
    if as_json:
        echo_json(asdict(status))
    else:
        click.echo(describe_end(status))
    leave_with(status)
