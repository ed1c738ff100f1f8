"""Cleanup of the local tier after a crash: copies checkpoints to the run folder and removes the rest.

Ranks that exit normally clean up themselves; killed ranks leave checkpoints in node memory. The next attempt
may use other nodes, and memory that is never freed is unavailable to all jobs on the node.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

from hpctrain import system
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.launch.auxiliary_step import run_auxiliary_step
from hpctrain.supervisor.launch.job_step import Launcher, StepEnded
from hpctrain.supervisor.launch.worker_command import module_command

log = logging.getLogger(__name__)

#: Time limit in seconds. A failure loses at most one save interval of training.
_LIMIT_S = 120.0
#: Copies the files once per node.
_KEEP = """
[ "$SLURM_LOCALID" = 0 ] || exit 0
mkdir -p -m 700 "$2" && mkdir "$2/$SLURM_NODEID" && cp -R "$1"/*-* "$2/$SLURM_NODEID"
"""
_REMOVAL_LIMIT_S = 30.0
#: After a stop, the job may have a few seconds left.
_REMOVAL_LIMIT_AFTER_STOP_S = 5.0


def drain_local_tier(
    run: RunDir,
    spec: JobSpec,
    launcher: Launcher,
    attempt: int,
    lost: Container[str],
    limit_s: float = _LIMIT_S,
) -> None:
    """Copy checkpoints that exist only on the nodes to the run folder, and remove the local tier.

    Does nothing if the run has no local tier. Failures are only logged: the run continues from the run
    folder.

    Args:
        run: the run.
        spec: its job.
        launcher: starts processes on the nodes.
        attempt: the ended attempt.
        lost: nodes on which no process can start.
        limit_s: time limit in seconds.
    """
    if (base := local_tier_folder(run)) is None:
        return
    begun = system.monotonic()
    command = [*module_command(spec, "drain_local_tier"), str(base), f"{limit_s / 2:g}"]
    what = f"the cleanup of {base}"
    end = clean_nodes(run, launcher, command, attempt, lost, limit_s, what, uses_store=True)
    if end is not None and end.returncode == 0:
        log.info("emptied the fast folder %s on the nodes in %.1f s", base, system.monotonic() - begun)
    elif end is not None:
        log.warning(
            "cannot remove all files from the fast folder %s on the nodes: %s",
            base,
            end.stderr_tail or f"exit code {end.returncode}",
        )


def keep_emergency_checkpoint(
    run: RunDir, launcher: Launcher, folder: str, attempt: int, lost: Container[str]
) -> bool:
    """Copy the emergency checkpoint and the records of the ranks from the nodes to the run folder.

    Args:
        run: the run.
        launcher: starts processes on the nodes.
        folder: the folder on each node.
        attempt: the ended attempt.
        lost: nodes on which no process can start.

    Returns:
        True if all nodes have copied their files. Failures are only logged.
    """
    begun, what = system.monotonic(), f"the copy of the emergency checkpoint to {run.emergency}"
    command = ["/bin/sh", "-c", _KEEP, "sh", folder, str(run.emergency)]
    end = clean_nodes(run, launcher, command, attempt, lost, _LIMIT_S, what)
    if end is None or end.returncode:
        log.warning("%s failed, so the run resumes from its newest regular checkpoint", what)
        return False
    log.info("copied the emergency checkpoint to %s in %.1f s", run.emergency, system.monotonic() - begun)
    return True


def remove_emergency_files(
    run: RunDir, launcher: Launcher, folder: str | None, attempt: int, lost: Container[str], *, is_stop: bool
) -> None:
    """Remove the emergency checkpoint and the records of killed ranks from the nodes; log failures.

    Args:
        run: the run.
        launcher: starts processes on the nodes.
        folder: the folder on each node; None if there is none.
        attempt: the ended attempt.
        lost: nodes on which no process can start.
        is_stop: True after a stop.
    """
    if folder is not None:
        limit_s = _REMOVAL_LIMIT_AFTER_STOP_S if is_stop else _REMOVAL_LIMIT_S
        command = ["rm", "-rf", "--", folder]
        clean_nodes(run, launcher, command, attempt, lost, limit_s, f"the removal of {folder}")


def clean_nodes(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    lost: Container[str],
    limit_s: float,
    what: str,
    *,
    uses_store: bool = False,
) -> StepEnded | None:
    """Run an auxiliary step on the nodes that are not lost; None if there are none, or if it fails."""
    all_hosts = launcher.hosts
    launcher.hosts = [host for host in all_hosts if host not in lost]
    try:
        if launcher.hosts:
            return run_auxiliary_step(
                run, launcher, command, attempt, limit_s=limit_s, what=what, uses_store=uses_store
            )
    except OSError as error:
        log.warning("%s failed, so files remain on the nodes: %s", what, error)
    finally:
        launcher.hosts = all_hosts
    return None


def local_tier_folder(run: RunDir) -> Path | None:
    """Return the local tier's folder on each node; None if the run has none."""
    base = None
    for event in run.read_events():
        if event.get("kind") in ("checkpoint", "memory_copy") and event.get("tier") == "local":
            base = Path(str(event.get("path"))).parent.parent
    return base
