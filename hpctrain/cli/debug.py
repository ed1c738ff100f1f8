"""`hpctrain debug`: debug a running rank with pdb."""

from __future__ import annotations

from pathlib import Path

import click

from hpctrain.cli.attach import rank_option, start_beside_rank
from hpctrain.cli.common import run_argument


@click.command("debug")
@run_argument
@rank_option
def command(run: str, runs_dir: Path, rank: int) -> None:
    """Stop a running rank of RUN, and debug it with pdb. The rank continues when you quit pdb.

    While the rank is stopped, the other ranks wait at their next collective operation, and hangs are not
    detected.
    """
    start_beside_rank(run, runs_dir, rank, "debug_client", ())
