"""`hpctrain pull`: copy a run from a cluster to this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.common import short_path
from hpctrain.cli.on_cluster import needed_cluster, run_json
from hpctrain.remote.cluster import Cluster
from hpctrain.remote.ssh_connection import ClusterUnreachable

#: Number of consecutive lost connections without progress after which the copy fails.
_MAX_STALLED = 8


@click.command("pull")
@click.argument("run", metavar="RUN")
@click.argument("dest", metavar="[DEST]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--all-checkpoints", is_flag=True, help="Copy all checkpoints, not only the newest and the best."
)
@click.pass_context
def command(ctx: click.Context, run: str, dest: Path | None, all_checkpoints: bool) -> None:
    """Copy RUN from a cluster (--on) to DEST: logs, metrics, report, newest and best checkpoints.

    DEST is runs/RUN by default. If the connection is lost, the copy continues after reconnecting. A second
    `pull` copies only what has changed.
    """
    cluster = needed_cluster(ctx)
    copied, size_bytes, stalled = dest, -1, 0
    while True:
        try:
            status = run_json(cluster, ["status", run, "--json"])
            copied = dest or Path("runs", status["run_id"])
            has_report = _copy(cluster, status, copied, all_checkpoints=all_checkpoints)
            break
        except ClusterUnreachable as error:
            before, size_bytes = size_bytes, _size(copied)
            stalled = stalled + 1 if size_bytes == before else 0
            if error.is_permanent or stalled == _MAX_STALLED:
                raise
            cluster.connection.reopen(lambda words: click.echo(words, err=True))
            time.sleep(min(2.0**stalled / 2, 30.0))
    click.echo(f"Run copied to {short_path(copied)}{', with report.html' if has_report else ''}")


def _size(folder: Path | None) -> int:
    """Return the bytes of all files below a folder."""
    files = folder.rglob("*") if folder else ()
    return sum(path.lstat().st_size for path in files)


def _copy(cluster: Cluster, status: dict[str, Any], copied: Path, *, all_checkpoints: bool) -> bool:
    """Copy the run, and return true if it has a new report."""
    cluster.connection.find_rsync()
    report = cluster.connection.run(cluster.hpctrain(["report", status["run_dir"]]))
    if report.returncode:
        reason = report.stderr.strip().removeprefix("Error: ")
        click.echo(f"Warning: cannot write report.html on {cluster.name}: {reason}", err=True)
    best = (status.get("best") or {}).get("checkpoint")
    kept = {Path(path).name for path in (status["checkpoint"], best) if path}
    filters = [f"--include=/checkpoints/{name}{inside}" for name in sorted(kept) for inside in ("", "/**")]
    filters += ["--exclude=/checkpoints/*", "--exclude=/task-*/checkpoints/*"]
    copied.mkdir(parents=True, exist_ok=True)
    progress = ["--info=progress2"] * sys.stdout.isatty()
    options = ["-rlpt", "--partial", *progress, *([] if all_checkpoints else filters)]
    cluster.connection.rsync(
        [*options, f"{cluster.name}:{status['run_dir']}/", f"{copied}/"], may_vanish=True
    )
    return not report.returncode
