"""Stage files on the local disk of each node before the ranks start."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from hpctrain import system
from hpctrain.cluster import compress_hostlist
from hpctrain.errors import StagingError
from hpctrain.files import REMOVE_COMMAND, read_json
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    RUN_DIR_VARIABLE,
    STAGE_VARIABLE,
    STAGED_CODE,
    STAGED_ENVIRONMENT,
    RunDir,
    event_record,
)
from hpctrain.schema import Event, to_record
from hpctrain.supervisor.launch.job_step import HangDetected, Launcher, StepEvent
from hpctrain.supervisor.launch.task_command import module_command
from hpctrain.supervisor.node_steps import clean_nodes
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor, AttemptOutcome
from hpctrain.telemetry.startup_parts import describe_staging
from hpctrain.text import format_duration, pluralize

log = logging.getLogger(__name__)

#: Copies of a node by name, as returned by `stage`.
_Copies = dict[str, dict[str, Any]]
#: Time limit of the copies, also if the job has none.
_LIMIT_S = 4 * 3600.0
_REMOVAL_LIMIT_S = 120.0
#: After a stop, the job may have a few seconds left.
_SHORT_REMOVAL_LIMIT_S = 5.0
#: Runs a command in one process of each node.
_ONCE_PER_NODE = ["/bin/sh", "-c", '[ "$SLURM_LOCALID" != 0 ] || exec "$@"', "sh"]


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
        variables = {RUN_DIR_VARIABLE: str(self.run.path), ATTEMPT_VARIABLE: str(attempt)}
        log.info("attempt %d: staging on %s, in %s", attempt, pluralize(len(hosts), "node"), self.plan.folder)
        self.launcher.hosts = hosts
        cause = f"the copies to the local disks took more than {format_duration(_LIMIT_S)}. Stage less data"
        step = self.launcher.start([*_ONCE_PER_NODE, *command], variables, self.events.put)
        timer = system.Timer(_LIMIT_S, lambda: self.events.put(HangDetected(cause, 0, hosts[0])))
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
        limit_s = _SHORT_REMOVAL_LIMIT_S if is_short else _REMOVAL_LIMIT_S
        purpose = f"the removal of {self.plan.folder}"
        clean_nodes(self.run, self.launcher, command, attempt, lost, limit_s, purpose)

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
