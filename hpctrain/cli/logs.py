"""`hpctrain logs`: what a rank printed."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.common import open_run, run_argument, short_path
from hpctrain.errors import UserError


@click.command("logs")
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended, across its attempts.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose log.")
def command(run: str, runs_dir: Path, follow: bool, rank: int) -> None:
    """Print a rank's log of the newest attempt of RUN."""
    found = open_run(run, runs_dir)
    if follow:
        from hpctrain.cli.stream import stream

        stream(found, rank, whole=False)
        return
    path = found.log_path(rank)
    if path is None:
        raise UserError(f"Run {found.run_id} has not started yet. `hpctrain logs -f` waits for it.")
    if not path.exists():
        others = sorted(int(log.stem.removeprefix("rank-")) for log in path.parent.glob("rank-*.log"))
        known = f"ranks {others[0]} to {others[-1]}" if others else "none yet"
        raise UserError(
            f"There is no log of rank {rank} in {short_path(path.parent)}: it has {known} (--rank)."
        )
    from hpctrain.jobs.tail import Tail

    tail = Tail(path)
    while text := tail.read():
        click.echo(text, nl=False)
