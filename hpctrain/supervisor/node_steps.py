"""Run steps on the nodes outside of training: a check before the ranks start, a clean-up after a crash.

Ranks that exit normally clean up themselves; killed ranks leave checkpoints in node memory. The next attempt
may use other nodes, and memory that is never freed is unavailable to all jobs on the node.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain import system
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.schema import NodeCheck, read_record
from hpctrain.supervisor.launch.job_step import Launcher, StepEnded, StepEvent
from hpctrain.supervisor.launch.rendezvous_store import RendezvousStore
from hpctrain.supervisor.launch.task_command import module_command
from hpctrain.supervisor.policy.decide import describe_nodes

log = logging.getLogger(__name__)

#: Time limit of a check; ranks without a result count as failed.
_CHECK_LIMIT_S = 90.0
#: Failures that cause a check of the nodes if `node_check` is `auto`.
_SUSPICIOUS = frozenset({EndKind.GPU, EndKind.COMMUNICATION, EndKind.HANG})
#: Time limit in seconds. A failure loses at most one save interval of training.
_DRAIN_LIMIT_S = 120.0
#: After a stop, the job may have a few seconds left.
_REMOVAL_LIMIT_AFTER_STOP_S = 5.0


def run_node_step(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    limit_s: float,
    purpose: str,
    *,
    uses_store: bool = False,
) -> StepEnded | None:
    """Run a command on the launcher's nodes, and wait for its end; None if it was killed at the limit."""
    deadline = system.monotonic() + limit_s
    events: system.SimpleQueue[StepEvent] = system.SimpleQueue()
    with RendezvousStore(launcher.address, hosted=uses_store) as rendezvous:
        variables = {RUN_DIR_VARIABLE: str(run.path), ATTEMPT_VARIABLE: str(attempt)}
        step = launcher.start(command, rendezvous.variables | variables, events.put)
        try:
            rendezvous.serve()
            while True:
                try:
                    event = events.get(timeout=max(0.0, deadline - system.monotonic()))
                except queue.Empty:
                    log.warning("timed out after %.0f s waiting for %s", limit_s, purpose)
                    return None
                if isinstance(event, StepEnded):
                    return event
        finally:
            step.close()


def clean_nodes(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    lost: Container[str],
    limit_s: float,
    purpose: str,
    *,
    uses_store: bool = False,
) -> StepEnded | None:
    """Run a command on the nodes that are not lost; failures are only logged."""
    all_hosts = launcher.hosts
    launcher.hosts = [host for host in all_hosts if host not in lost]
    try:
        if launcher.hosts:
            return run_node_step(run, launcher, command, attempt, limit_s, purpose, uses_store=uses_store)
    except OSError as error:
        log.warning("%s failed, so files remain on the nodes: %s", purpose, error)
    finally:
        launcher.hosts = all_hosts
    return None


def drain_local_tier(
    run: RunDir, spec: JobSpec, launcher: Launcher, attempt: int, lost: Container[str]
) -> None:
    """Copy the newest state that exists only on the nodes to the run folder, and remove it from the nodes."""
    folders = [str(folder) if folder else "-" for folder in _node_folders(run)]
    names = " and ".join(folder for folder in folders if folder != "-")
    if not names:
        return
    begun = system.monotonic()
    command = [*module_command(spec, "drain_local_tier"), *folders, f"{_DRAIN_LIMIT_S / 2:g}"]
    purpose = f"the cleanup of {names}"
    end = clean_nodes(run, launcher, command, attempt, lost, _DRAIN_LIMIT_S, purpose, uses_store=True)
    if end is not None and end.returncode == 0:
        log.info("emptied %s on the nodes in %.1f s", names, system.monotonic() - begun)
    elif end is not None:
        cause = end.stderr_tail or f"exit code {end.returncode}"
        log.warning("cannot remove all files from %s on the nodes: %s", names, cause)


def remove_copies(run: RunDir, launcher: Launcher, attempt: int, lost: Container[str]) -> None:
    """Remove the copies in memory of ranks that were killed during a stop."""
    if (folder := _node_folders(run)[1]) is not None:
        command, purpose = ["rm", "-rf", "--", str(folder)], f"the removal of {folder}"
        clean_nodes(run, launcher, command, attempt, lost, _REMOVAL_LIMIT_AFTER_STOP_S, purpose)


def _node_folders(run: RunDir) -> tuple[Path | None, Path | None]:
    """Return the folders of the local tier and of the copies in memory on each node, if any."""
    tier = copies = None
    for event in run.read_events():
        if event.kind == "checkpoint" and event.tier == "local":
            tier = Path(str(event.path)).parent.parent
        elif event.kind == "memory_copy":
            copies = Path(str(event.path))
    return tier, copies


@dataclass(frozen=True)
class NodeCheckResult:
    bad_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes on which a rank failed its check, with the reason."""
    stopped: bool = False


def node_check_is_due(spec: JobSpec, last_end: EndKind | None) -> bool:
    """Return true if the nodes must be checked after this end of the previous attempt, if any."""
    return spec.node_check == "always" or (spec.node_check == "auto" and last_end in _SUSPICIOUS)


def check_nodes(run: RunDir, spec: JobSpec, launcher: Launcher, attempt: int) -> NodeCheckResult:
    begun = system.monotonic()
    command = module_command(spec, "node_check")
    end = run_node_step(run, launcher, command, attempt, _CHECK_LIMIT_S, "the node check", uses_store=True)
    result = _read_node_check(run, launcher.hosts, spec.processes_per_node, attempt)
    bad_nodes = describe_nodes(result.bad_nodes) or "no faulty node identified"
    outcome = "stop requested" if result.stopped else bad_nodes
    log.info("node check took %.1f s: %s", system.monotonic() - begun, outcome)
    if end is not None and not any(run.node_check_results(attempt)):
        # If no process could start, no single node is to blame.
        log.warning("the node check did not start: %s", end.stderr_tail)
        return NodeCheckResult()
    return result


def _read_node_check(run: RunDir, hosts: list[str], per_node: int, attempt: int) -> NodeCheckResult:
    bad_nodes: dict[str, str] = {}
    for rank in range(len(hosts) * per_node):
        try:
            check = read_record(run.node_check_result(attempt, rank), NodeCheck)
        except (OSError, ValueError):
            check = NodeCheck(["the check did not finish"])
        if check.stopped:
            return NodeCheckResult(stopped=True)
        if check.trouble:
            bad_nodes.setdefault(hosts[rank // per_node], "; ".join(check.trouble))
    # If every node reports a problem, the cause is shared, such as the network.
    return NodeCheckResult(bad_nodes if len(bad_nodes) < len(hosts) or len(hosts) == 1 else {})
