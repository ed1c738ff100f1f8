"""Copy a run from a cluster to this machine (`hpctrain pull`)."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.cli.common import short_path
from hpctrain.cli.on_cluster import needed_cluster, run_json
from hpctrain.errors import CheckpointError, UserError
from hpctrain.remote.cluster import Cluster
from hpctrain.remote.ssh_connection import ClusterUnreachable
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.run_results import read_spec

#: Names of hpctrain's checkpoints. The files of a script's own checkpoints belong together.
_CHECKPOINTS = (f"step-{'[0-9]' * 8}*", ".saving-*", ".deleting-*")
#: Number of tries if checkpoints are deleted on the cluster during the copy.
_MAX_TRIES = 3
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
    copied, size_bytes, stalled, tries = dest, -1, 0, 0
    while True:
        try:
            status = run_json(cluster, ["status", run, "--json"])
            copied = dest or Path("runs", status["run_id"])
            _check_destination(copied, status)
            has_report = _copy(cluster, status, copied, all_checkpoints=all_checkpoints)
            if (missing := _incomplete_checkpoint(status, copied)) is None:
                break
            if (tries := tries + 1) == _MAX_TRIES:
                raise UserError(
                    f"The copy of {missing} is incomplete, because the run deletes its old checkpoints "
                    "faster than they are copied. Try again when the run has ended."
                )
        except ClusterUnreachable as error:
            before, size_bytes = size_bytes, _size(copied)
            stalled = stalled + 1 if size_bytes == before else 0
            if error.is_permanent or stalled == _MAX_STALLED:
                raise
            cluster.connection.reopen(lambda message: click.echo(message, err=True))
            time.sleep(min(2.0**stalled / 2, 30.0))
    click.echo(f"Run copied to {short_path(copied)}{', with report.html' if has_report else ''}")


def _size(folder: Path | None) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*")) if folder else 0


def _check_destination(copied: Path, status: dict[str, Any]) -> None:
    run_dir = read_spec(RunDir(copied).spec).get("run_dir")
    if run_dir not in (None, status["run_dir"]):
        raise UserError(
            f"{str(copied)!r} contains the run in {run_dir!r}, but the run to copy is in "
            f"{status['run_dir']!r}. Name another destination (DEST)."
        )


def _kept_checkpoints(status: dict[str, Any]) -> set[str]:
    """Return the names of the newest and the best checkpoint in the run folder."""
    best = (status.get("best") or {}).get("checkpoint")
    paths = [Path(path) for path in (status["checkpoint"], best) if path]
    folder = RunDir(Path(status["run_dir"])).checkpoints
    return {path.name for path in paths if path.parent == folder}


def _incomplete_checkpoint(status: dict[str, Any], copied: Path) -> Path | None:
    """Return the copy of a checkpoint that lacks files; None if all are complete."""
    for name in sorted(_kept_checkpoints(status)):
        path = RunDir(copied).checkpoints / name
        if not re.fullmatch(r"step-\d{8,}", name):
            continue
        try:
            files = Manifest.read(path).files
            if any((path / entry.name).stat().st_size != entry.bytes for entry in files):
                return path
        except (CheckpointError, OSError):
            return path
    return None


def _copy(cluster: Cluster, status: dict[str, Any], copied: Path, *, all_checkpoints: bool) -> bool:
    """Copy the run, and return true if it has a new report."""
    cluster.connection.find_rsync()
    report = cluster.connection.run(cluster.hpctrain(["report", status["run_dir"]]))
    if report.returncode:
        reason = report.stderr.strip().removeprefix("Error: ")
        click.echo(f"Warning: cannot write report.html on {cluster.name}: {reason}", err=True)
    names = sorted(_kept_checkpoints(status))
    filters = [f"--include=/checkpoints/{name}{inside}" for name in names for inside in ("", "/**")]
    filters += [f"--exclude={task}/checkpoints/{name}" for task in ("", "/task-*") for name in _CHECKPOINTS]
    copied.mkdir(parents=True, exist_ok=True)
    progress = ["--info=progress2"] * sys.stdout.isatty()
    options = ["-rlpt", "--partial", *progress, *([] if all_checkpoints else filters)]
    cluster.connection.rsync(
        [*options, f"{cluster.name}:{status['run_dir']}/", f"{copied}/"], may_vanish=True
    )
    return not report.returncode
