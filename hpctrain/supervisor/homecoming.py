"""Before nodes are given back after a crash: what lies in their fast folder is brought home, and removed.

Ranks that leave in order do so themselves. Those that were killed leave checkpoints in the memory of the
nodes: the next start may be elsewhere, and memory that nobody gives back is gone for all jobs of the node.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container
from pathlib import Path

from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.command import module_command
from hpctrain.supervisor.side_step import run_side_step
from hpctrain.supervisor.step import Launcher

log = logging.getLogger(__name__)

#: How long this may keep a job from its end, in seconds. What a crash left is worth one interval of saving.
_LIMIT_S = 120.0


def bring_home(
    run: RunDir,
    spec: JobSpec,
    launcher: Launcher,
    attempt: int,
    lost: Container[str],
    limit_s: float = _LIMIT_S,
) -> None:
    """Have the nodes copy to the run folder what only they have, and remove their folders; if there are any.

    Where that does not work, it is said in the log: the run goes on from what is in the run folder.

    Args:
        run: the run.
        spec: its job.
        launcher: starts processes on the nodes.
        attempt: the start of the ranks that has ended.
        lost: nodes that nothing can be started on.
        limit_s: how long that may take, in seconds.
    """
    base, all_hosts = fast_folder(run), launcher.hosts
    hosts = [host for host in all_hosts if host not in lost]
    if base is None or not hosts:
        return
    begun = time.monotonic()
    command = [*module_command(spec, "bring_home"), str(base), f"{limit_s / 2:g}"]
    launcher.hosts = hosts
    try:
        end = run_side_step(
            run, launcher, command, attempt, limit_s=limit_s, what=f"what lies in {base} on the nodes"
        )
    except OSError as error:
        log.warning("what lies in %s on the nodes stays there: %s", base, error)
        return
    finally:
        launcher.hosts = all_hosts
    if end is not None and end.returncode == 0:
        log.info("%s is cleared on all nodes, in %.1f s", base, time.monotonic() - begun)
    elif end is not None:
        log.warning("what lies in %s on the nodes may stay there: %s", base, end.words or "see the log")


def fast_folder(run: RunDir) -> Path | None:
    """The folder on each node into which the run saves first; None where there is none."""
    base = None
    for event in run.read_events():
        if event.get("kind") == "checkpoint" and event.get("tier") == "local":
            base = Path(str(event.get("path"))).parent.parent
    return base
