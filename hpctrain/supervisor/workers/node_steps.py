"""Run steps on the nodes outside of training: copies and checks before the start, and a clean-up.

Killed ranks leave checkpoints in node memory, which would be unavailable to all later jobs on the node.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import sys
from collections.abc import Container, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from msgspec.structs import replace

from hpctrain import system
from hpctrain.cluster import compress_hostlist
from hpctrain.errors import StagingError
from hpctrain.files import REMOVE_COMMAND, read_json
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import END_KINDS, EndKind
from hpctrain.record_types import Event, NodeCheck, read_record, to_record
from hpctrain.rundir import (
    STAGE_VARIABLE,
    STAGED_CODE,
    STAGED_ENVIRONMENT,
    RunDir,
    event_record,
)
from hpctrain.slurm.srun_step import StepEnded
from hpctrain.supervisor.launch.job_step import HangDetected, Launcher, RendezvousStore, StepEvent
from hpctrain.supervisor.launch.task_command import module_command
from hpctrain.supervisor.policy.decide import describe_nodes
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor, AttemptOutcome
from hpctrain.telemetry.startup_parts import describe_staging
from hpctrain.text import format_duration, pluralize

log = logging.getLogger(__name__)

#: Time limit of a check; ranks without a result count as failed.
_CHECK_LIMIT_S = 90.0
#: Time limit in seconds. A failure loses at most one save interval of training.
_DRAIN_LIMIT_S = 120.0
#: After a stop, the job may have a few seconds left.
_REMOVAL_LIMIT_AFTER_STOP_S = 5.0
#: Copies of a node by name, as returned by `stage`.
_Copies = dict[str, dict[str, Any]]
#: Time limit of the copies, also if the job has none.
_COPY_LIMIT_S = 4 * 3600.0
_REMOVAL_LIMIT_S = 120.0
#: Runs a command in one process of each node.
_ONCE_PER_NODE = ["/bin/sh", "-c", '[ "$SLURM_LOCALID" != 0 ] || exec "$@"', "sh"]


def run_node_step(
    run: RunDir,
    launcher: Launcher,
    command: list[str],
    attempt: int,
    limit_s: float,
    purpose: str,
    *,
    lost: Container[str] = (),
    uses_store: bool = False,
) -> StepEnded | None:
    """Run a command on the nodes that are not lost, and wait for its end; None if killed at the limit."""
    all_hosts, deadline = launcher.hosts, system.monotonic() + limit_s
    launcher.hosts = [host for host in all_hosts if host not in lost]
    events: system.SimpleQueue[StepEvent] = system.SimpleQueue()
    try:
        with RendezvousStore(launcher.address, hosted=uses_store) as rendezvous, ExitStack() as on_exit:
            if not launcher.hosts:
                return None
            step = launcher.start(command, rendezvous.variables | run.attempt_variables(attempt), events.put)
            on_exit.callback(step.close)
            rendezvous.serve()
            while True:
                event = events.get(timeout=max(0.0, deadline - system.monotonic()))
                if isinstance(event, StepEnded):
                    return event
    except queue.Empty:
        log.warning("timed out after %.0f s waiting for %s", limit_s, purpose)
    except OSError as error:
        log.warning("%s failed: %s", purpose, error)
        return StepEnded(1, str(error))
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
    end = run_node_step(run, launcher, command, attempt, _DRAIN_LIMIT_S, purpose, lost=lost, uses_store=True)
    if end is not None and end.returncode == 0:
        log.info("emptied %s on the nodes in %.1f s", names, system.monotonic() - begun)
    elif end is not None:
        cause = end.stderr_tail or f"exit code {end.returncode}"
        log.warning("cannot remove all files from %s on the nodes: %s", names, cause)


def remove_copies(run: RunDir, launcher: Launcher, attempt: int, lost: Container[str]) -> None:
    """Remove the copies in memory of ranks that were killed during a stop."""
    if (folder := _node_folders(run)[1]) is not None:
        command, purpose = ["rm", "-rf", "--", str(folder)], f"the removal of {folder}"
        run_node_step(run, launcher, command, attempt, _REMOVAL_LIMIT_AFTER_STOP_S, purpose, lost=lost)


def _node_folders(run: RunDir) -> tuple[Path | None, Path | None]:
    """Return the folders of the local tier and of the copies in memory on each node, if any."""
    tier = copies = None
    for event in run.read_events():
        if event.kind == "checkpoint" and event.tier == "local":
            tier = Path(str(event.path)).parent.parent
        elif event.kind == "memory_copy":
            copies = Path(str(event.path))
    return tier, copies


def node_check_is_due(spec: JobSpec, last_end: EndKind | None) -> bool:
    """Return true if the nodes must be checked after this end of the previous attempt, if any."""
    is_suspicious = last_end is not None and END_KINDS[last_end].checks_nodes
    return spec.node_check == "always" or (spec.node_check == "auto" and is_suspicious)


def check_nodes(run: RunDir, spec: JobSpec, launcher: Launcher, attempt: int) -> dict[str, str] | None:
    """Return the nodes on which a rank failed its check, with the reason; None after a request to stop."""
    begun = system.monotonic()
    command = module_command(spec, "node_check")
    end = run_node_step(run, launcher, command, attempt, _CHECK_LIMIT_S, "the node check", uses_store=True)
    bad_nodes = _read_node_check(run, launcher.hosts, spec.processes_per_node, attempt)
    nodes = describe_nodes(bad_nodes or {}) or "no faulty node identified"
    outcome = "stop requested" if bad_nodes is None else nodes
    log.info("node check took %.1f s: %s", system.monotonic() - begun, outcome)
    if end is not None and not any(run.node_check_results(attempt)):
        # If no process could start, no single node is to blame.
        log.warning("the node check did not start: %s", end.stderr_tail)
        return {}
    return bad_nodes


def _read_node_check(run: RunDir, hosts: list[str], per_node: int, attempt: int) -> dict[str, str] | None:
    bad_nodes: dict[str, str] = {}
    for rank in range(len(hosts) * per_node):
        try:
            check = read_record(run.node_check_result(attempt, rank), NodeCheck)
        except (OSError, ValueError):
            check = NodeCheck(["the check did not finish"])
        if check.stopped:
            return None
        if check.trouble:
            bad_nodes.setdefault(hosts[rank // per_node], "; ".join(check.trouble))
    # If every node reports a problem, the cause is shared, such as the network.
    return bad_nodes if len(bad_nodes) < len(hosts) or len(hosts) == 1 else {}


@dataclass(frozen=True)
class StagePlan:
    """Copies on each node, and the job that uses them."""

    folder: str
    arguments: str
    host_spec: JobSpec
    """The job without a container, which starts the processes that copy."""
    ranks_spec: JobSpec
    """The job with the interpreter, code and arguments of the ranks."""
    variables: Mapping[str, str]

    @classmethod
    def create(cls, spec: JobSpec, environ: Mapping[str, str]) -> StagePlan | None:
        """Plan the copies of a job on the local disks (TMPDIR); None without copies."""
        if not spec.stage and not spec.stage_environment:
            return None
        run, disk = RunDir(Path(spec.run_dir)), os.path.abspath(environ.get("TMPDIR") or "/tmp")
        key = xxhash.xxh3_64_hexdigest(os.fsencode(run.path))
        folder = os.path.join(disk, f"hpctrain-stage-{os.geteuid()}-{key}")
        ranks = replace(spec, args=tuple(arg.replace("{stage}", folder) for arg in spec.args))
        if spec.container is not None:
            # The folder itself does not exist before the copies.
            mounts = (f"{disk}:{disk}", *spec.container.mounts)
            ranks = replace(ranks, container=replace(spec.container, mounts=mounts))
        sources, packs, variables = dict(spec.stage), None, {STAGE_VARIABLE: folder}
        if spec.stage_environment:
            packs = str((run.array or run).path.parent / f".environments-{os.geteuid()}")
            prefix = os.path.join(folder, STAGED_ENVIRONMENT, "venv")
            python = os.path.join(prefix, "bin", os.path.basename(sys.executable))
            path = filter(None, [os.path.dirname(python), environ.get("PATH")])
            variables |= {"PATH": os.pathsep.join(path), "VIRTUAL_ENV": prefix}
            ranks = replace(ranks, python=python)
            if (code := spec.code) is not None:
                sources[STAGED_CODE], copy = code.copy, os.path.join(folder, STAGED_CODE)
                script = code.script and os.path.join(copy, os.path.relpath(code.script, code.copy))
                ranks = replace(ranks, code=replace(code, copy=copy, script=script))
        arguments = json.dumps({"folder": folder, "sources": sources, "packs": packs})
        return cls(folder, arguments, replace(spec, container=None), ranks, variables)


@dataclass
class Stager:
    run: RunDir
    plan: StagePlan
    launcher: Launcher
    events: system.SimpleQueue[StepEvent]

    def stage(self, attempt: int, hosts: list[str], monitor: AttemptMonitor) -> AttemptOutcome:
        """Copy everything to the nodes of an attempt, while `monitor` watches, and reuse unchanged copies."""
        begun = system.monotonic()
        command = [*module_command(self.plan.host_spec, "stage_node"), self.plan.arguments]
        variables = self.run.attempt_variables(attempt)
        log.info("attempt %d: staging on %s, in %s", attempt, pluralize(len(hosts), "node"), self.plan.folder)
        self.launcher.hosts = hosts
        limit = format_duration(_COPY_LIMIT_S)
        cause = f"the copies to the local disks took more than {limit}. Stage less data"
        step = self.launcher.start([*_ONCE_PER_NODE, *command], variables, self.events.put)
        timer = system.Timer(_COPY_LIMIT_S, lambda: self.events.put(HangDetected(cause, 0, hosts[0])))
        timer.start()
        try:
            outcome = monitor.wait(step)
        finally:
            timer.cancel()
            step.close()
        if monitor.hang is not None:
            raise StagingError(monitor.hang.cause)
        staged = self._collect_results(attempt, hosts)
        if outcome is AttemptOutcome.DONE:
            self._record(attempt, staged, system.monotonic() - begun)
        return outcome

    def remove(
        self, attempt: int, hosts: list[str], lost: Container[str] = (), *, is_short: bool = False
    ) -> None:
        """Remove the copies from the nodes that are not lost; failures are only logged."""
        self.launcher.hosts = hosts
        command = [*_ONCE_PER_NODE, *REMOVE_COMMAND, self.plan.folder]
        limit_s = _REMOVAL_LIMIT_AFTER_STOP_S if is_short else _REMOVAL_LIMIT_S
        purpose = f"the removal of {self.plan.folder}"
        run_node_step(self.run, self.launcher, command, attempt, limit_s, purpose, lost=lost)

    def _collect_results(self, attempt: int, hosts: list[str]) -> dict[str, _Copies]:
        staged: dict[str, _Copies] = {}
        problems: dict[str, list[str]] = {}
        for node, host in enumerate(hosts):
            # A node without a result was stopped, or is lost.
            with suppress(OSError, ValueError, KeyError, TypeError):
                record = read_json(self.run.staging_result(attempt, node))
                staged[host] = record["staged"]
                if record["error"] is not None:
                    problems.setdefault(record["error"], []).append(host)
        shutil.rmtree(self.run.staging_result(attempt, 0).parent, ignore_errors=True)
        if problems:
            causes = (f"{compress_hostlist(failed)}: {problem}" for problem, failed in problems.items())
            raise StagingError(". ".join(causes))
        return staged

    def _record(self, attempt: int, staged: dict[str, _Copies], seconds: float) -> None:
        first_host, expected = next(iter(staged.items()), ("", {}))
        for host, node in staged.items():
            if names := [name for name, copy in node.items() if copy["source"] != expected[name]["source"]]:
                raise StagingError(
                    f"{names[0]} differs between {first_host} and {host}, because its source changed during "
                    "the copy, or is not shared. Keep the source unchanged on a shared file system, then "
                    "resume the run"
                )
        copies = [copy for node in staged.values() for copy in node.values()]
        fresh = [copy for copy in copies if not copy["reused"]]
        saved_s = [sum(copy["saved_s"] for copy in node.values()) for node in staged.values()]
        summary = {
            "seconds": round(seconds, 3),
            "bytes": sum(copy["bytes"] for copy in fresh),
            "reused": len(copies) - len(fresh),
            "saved_s": round(max(saved_s, default=0.0), 3),
            "digests": {name: copy["source"] for name, copy in expected.items()},
        }
        record = event_record("staged", attempt, **summary)
        self.run.storage.append(self.run.events, record)
        log.info("attempt %d: %s", attempt, describe_staging(to_record(record, Event)))
