"""Clean up the nodes after a crash: copy the newest state to the run folder, and remove the rest.

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
from hpctrain.supervisor.launch.container_command import module_command
from hpctrain.supervisor.launch.job_step import Launcher, StepEnded

log = logging.getLogger(__name__)

#: Time limit in seconds. A failure loses at most one save interval of training.
_LIMIT_S = 120.0
#: After a stop, the job may have a few seconds left.
_REMOVAL_LIMIT_AFTER_STOP_S = 5.0


def drain_local_tier(
    run: RunDir,
    spec: JobSpec,
    launcher: Launcher,
    attempt: int,
    lost: Container[str],
) -> None:
    """Copy the newest state that exists only on the nodes to the run folder, and remove it from the nodes.

    Does nothing if the run has neither a local tier nor copies in memory. Failures are only logged: the run
    continues from the run folder.
    """
    folders = [str(folder) if folder else "-" for folder in node_folders(run)]
    names = " and ".join(folder for folder in folders if folder != "-")
    if not names:
        return
    begun = system.monotonic()
    command = [*module_command(spec, "drain_local_tier"), *folders, f"{_LIMIT_S / 2:g}"]
    what = f"the cleanup of {names}"
    end = clean_nodes(run, launcher, command, attempt, lost, _LIMIT_S, what, uses_store=True)
    if end is not None and end.returncode == 0:
        log.info("emptied %s on the nodes in %.1f s", names, system.monotonic() - begun)
    elif end is not None:
        log.warning(
            "cannot remove all files from %s on the nodes: %s",
            names,
            end.stderr_tail or f"exit code {end.returncode}",
        )


def remove_copies(run: RunDir, launcher: Launcher, attempt: int, lost: Container[str]) -> None:
    """Remove the copies in memory of ranks that were killed during a stop; log failures."""
    if (folder := node_folders(run)[1]) is not None:
        command, what = ["rm", "-rf", "--", str(folder)], f"the removal of {folder}"
        clean_nodes(run, launcher, command, attempt, lost, _REMOVAL_LIMIT_AFTER_STOP_S, what)


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


def node_folders(run: RunDir) -> tuple[Path | None, Path | None]:
    """Return the folders of the local tier and of the copies in memory on each node, if any."""
    tier = copies = None
    for event in run.read_events():
        if event.get("kind") == "checkpoint" and event.get("tier") == "local":
            tier = Path(str(event.get("path"))).parent.parent
        elif event.get("kind") == "memory_copy":
            copies = Path(str(event.get("path")))
    return tier, copies
