"""`hpctrain pull`: copy a run from a cluster to this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hpctrain.cli.common import short_path
from hpctrain.cli.on_cluster import needed_cluster, run_json
from hpctrain.remote.cluster import Cluster
from hpctrain.remote.ssh_connection import ClusterUnreachable


@click.command("pull")
@click.argument("run", metavar="RUN")
@click.argument("dest", metavar="[DEST]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--all-checkpoints", is_flag=True, help="Copy all checkpoints, not only the newest and the best."
)
@click.pass_context
def command(ctx: click.Context, run: str, dest: Path | None, all_checkpoints: bool) -> None:
    """Copy RUN from a cluster (--on) to DEST: logs, metrics, a new report, newest and best checkpoint.

    DEST is runs/RUN by default. If the connection is lost, the copy continues when it is back. A second
    `pull` copies only what has changed.
    """
    cluster = needed_cluster(ctx)
    while True:
        try:
            copied = _copy(cluster, run, dest, all_checkpoints=all_checkpoints)
            break
        except ClusterUnreachable as error:
            if error.is_permanent:
                raise
            cluster.connection.reopen(lambda words: click.echo(words, err=True))
    click.echo(f"Run copied to {short_path(copied)}, with report.html")


def _copy(cluster: Cluster, run: str, dest: Path | None, *, all_checkpoints: bool) -> Path:
    status = run_json(cluster, ["status", run, "--json"])
    cluster.connection.run(cluster.hpctrain(["report", run]))
    best = (status.get("best") or {}).get("checkpoint")
    kept = {Path(path).name for path in (status["checkpoint"], best) if path}
    filters = [f"--include=/checkpoints/{name}{inside}" for name in sorted(kept) for inside in ("", "/**")]
    filters += ["--exclude=/checkpoints/*", "--exclude=/task-*/checkpoints/*"]
    copied = dest or Path("runs", status["run_id"])
    copied.mkdir(parents=True, exist_ok=True)
    progress = ["--info=progress2"] * sys.stdout.isatty()
    options = ["-rlpt", "--partial", *progress, *([] if all_checkpoints else filters)]
    cluster.connection.rsync([*options, f"{cluster.name}:{status['run_dir']}/", f"{copied}/"])
    return copied
