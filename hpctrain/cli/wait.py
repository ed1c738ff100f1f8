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
@json_option
def command(run: str, runs_dir: Path, timeout: float | None, as_json: bool) -> None:
    """Wait until RUN has ended: exit code 0 after success, 4 after anything else, 1 after --timeout."""
    status = open_run(run, runs_dir).wait_for_end(timeout, tell=partial(click.echo, err=True))
    if as_json:
        echo_json(asdict(status))
    else:
        click.echo(describe_end(status))
    leave_with(status)
