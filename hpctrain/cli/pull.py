"""Copy a run from a cluster (`hpctrain pull`)."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import click

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.cli.common import short_path
from hpctrain.cli.on_login_node import needed_login_node, print_note
from hpctrain.errors import CheckpointError, UserError
from hpctrain.remote.login_node import LoginNode
from hpctrain.remote.ssh_connection import LoginNodeUnreachable
from hpctrain.rundir import RunDir

#: Names of hpctrain's checkpoints. The files of a script's own checkpoints belong together.
_CHECKPOINTS = (f"step-{'[0-9]' * 8}*", ".saving-*", ".deleting-*")
#: Number of tries to copy a run if checkpoints are deleted on the cluster during the copy.
_MAX_TRIES = 3
#: Number of consecutive lost connections without progress after which the copy fails.
_MAX_STALLED = 8


@click.command(name="pull")
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
    login_node = needed_login_node(ctx)
    copied, size_bytes, stalled, tries = dest, -1, 0, 0
    while True:
        try:
            status = _query_status(login_node, run)
            copied = dest or Path("runs", status["run_id"])
            has_report = _copy(login_node, status, copied, all_checkpoints=all_checkpoints)
            folders = (RunDir(copied).checkpoints / name for name in _kept_checkpoints(status))
            if (missing := next((path for path in folders if not _is_complete(path)), None)) is None:
                break
            if (tries := tries + 1) == _MAX_TRIES:
                raise UserError(
                    f"The copy of {missing} is incomplete, because the run deletes its old checkpoints "
                    "faster than they are copied. Try again when the run has ended."
                )
        except LoginNodeUnreachable as error:
            before = size_bytes
            size_bytes = sum(path.lstat().st_size for path in copied.rglob("*")) if copied else 0
            stalled = stalled + 1 if size_bytes == before else 0
            if error.is_permanent or stalled == _MAX_STALLED:
                raise
            login_node.connection.reopen(print_note)
            time.sleep(min(2.0**stalled / 2, 30.0))
    click.echo(f"Run copied to {short_path(copied)}{', with report.html' if has_report else ''}")


def _query_status(login_node: LoginNode, run: str) -> dict[str, Any]:
    result = login_node.connection.run(login_node.hpctrain(["status", run, "--json"]))
    if result.returncode:
        raise UserError(f"{login_node.name}: {result.stderr.strip().removeprefix('Error: ')}")
    status: dict[str, Any] = json.loads(result.stdout)
    return status


def _kept_checkpoints(status: dict[str, Any]) -> list[str]:
    """Return the names of the newest and the best checkpoint in the run folder."""
    best = (status.get("best") or {}).get("checkpoint")
    paths = [Path(path) for path in (status["checkpoint"], best) if path]
    folder = RunDir(Path(status["run_dir"])).checkpoints
    return sorted({path.name for path in paths if path.parent == folder})


def _is_complete(checkpoint: Path) -> bool:
    """True if a copy has all files of its manifest. A checkpoint of the script has no manifest."""
    if not re.fullmatch(r"step-\d{8,}", checkpoint.name):
        return True
    try:
        files = Manifest.read(checkpoint).files
        return all((checkpoint / entry.name).stat().st_size == entry.bytes for entry in files)
    except (CheckpointError, OSError):
        return False


def _copy(login_node: LoginNode, status: dict[str, Any], copied: Path, *, all_checkpoints: bool) -> bool:
    """Copy the run, and return true if it has a new report."""
    from hpctrain.telemetry.report.run_results import read_spec

    run_dir = status["run_dir"]
    if (copied_run := read_spec(RunDir(copied).spec).get("run_dir")) not in (None, run_dir):
        raise UserError(
            f"{str(copied)!r} contains the run in {copied_run!r}, but the run to copy is in {run_dir!r}. "
            "Name another destination (DEST)."
        )
    login_node.connection.find_rsync()
    report = login_node.connection.run(login_node.hpctrain(["report", run_dir]))
    if report.returncode:
        reason = report.stderr.strip().removeprefix("Error: ")
        print_note(f"Warning: cannot write report.html on {login_node.name}: {reason}")
    options = ["-rlpt", "--partial", *(["--info=progress2"] if sys.stdout.isatty() else [])]
    if not all_checkpoints:
        names = _kept_checkpoints(status)
        options += [f"--include=/checkpoints/{name}{inside}" for name in names for inside in ("", "/**")]
        options += [f"--exclude={t}/checkpoints/{name}" for t in ("", "/task-*") for name in _CHECKPOINTS]
    copied.mkdir(parents=True, exist_ok=True)
    login_node.connection.rsync([*options, f"{login_node.name}:{run_dir}/", f"{copied}/"], may_vanish=True)
    return not report.returncode
