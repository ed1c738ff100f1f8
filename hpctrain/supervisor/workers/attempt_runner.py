"""One attempt: a rendezvous store, a job step for the ranks, and its monitor."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hpctrain.checkpoint.script_checkpoints import ScriptCheckpointWatcher
from hpctrain.cluster import compress_hostlist
from hpctrain.crash_output import file_size
from hpctrain.errors import SchedulerError
from hpctrain.rundir import (
    ARRAY_TASK_VARIABLE,
    ATTEMPT_VARIABLE,
    CODE_SOURCE_VARIABLE,
    CODE_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_GRACE_VARIABLE,
    RunDir,
)
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.job_control.signal_lead import required_lead_s
from hpctrain.supervisor.launch.job_step import Launcher, StepEvent
from hpctrain.supervisor.launch.rendezvous_store import RendezvousStore
from hpctrain.supervisor.policy.outcome import AttemptOutcome
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor
from hpctrain.supervisor.workers.worker_group import WorkerGroup
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Grace time that the ranks receive for the signal before the time limit.
_GRACE_OF_LIMIT = re.compile(r"(\bSIGUSR2=)[\d.]+")


@dataclass(frozen=True)
class AttemptResult:
    """An attempt that is over."""

    attempt: int
    outcome: AttemptOutcome
    watch: AttemptMonitor
    ranks_met: bool
    """True if the ranks have used the store."""
    said: int
    """Size of the job's own log, in bytes, when the attempt began."""
    begun: float = 0.0
    """Start of the attempt, in seconds since the epoch."""


@dataclass(frozen=True)
class AttemptRunner:
    """Starts the ranks of a run on the launcher's nodes."""

    run: RunDir
    spec: JobSpec
    launcher: Launcher
    scheduler: JobControl
    events: queue.SimpleQueue[StepEvent]
    crew: WorkerGroup
    grace: Mapping[str, str]
    """Variables with the grace time of each signal."""

    @property
    def world_size(self) -> int:
        """The number of ranks on the current nodes of the job."""
        return len(self.launcher.hosts) * self.spec.ntasks_per_node

    def start(self, attempt: int) -> AttemptResult:
        """Start the ranks and monitor them to their end."""
        lead = required_lead_s(self.run, self.spec.stop_before_limit_s, self.spec.time_limit_s)
        watch = AttemptMonitor(
            events=self.events,
            scheduler=self.scheduler,
            ends_at=self._ends_at(lead),
            stop_before_limit_s=lead,
            process="rank" if self.spec.torchrun is None else "agent",
        )
        hosts, begun = self.launcher.hosts, time.time()
        scripts_own = ScriptCheckpointWatcher(self.run.checkpoints)
        with RendezvousStore(self.launcher.address) as rendezvous:
            self.run.log_event("started", attempt, nodes=len(hosts), world_size=self.world_size, hosts=hosts)
            said = file_size(self.run.slurm_log)
            ranks, nodes = pluralize(self.world_size, "rank"), compress_hostlist(hosts)
            log.info("attempt %d: starting %s on %s", attempt, ranks, nodes)
            variables = partial(self._variables, lead=lead)
            step = self.crew.start(attempt, rendezvous.variables, variables, self.events.put)
            try:
                rendezvous.serve()
                outcome = watch.until_end(step)
                ranks_met = rendezvous.was_used()
            finally:
                self.crew.end()
                step.close()
        if (path := scripts_own.newest_since()) is not None:
            self.run.log_event("checkpoint", attempt, step=None, path=str(path))
        return AttemptResult(attempt, outcome, watch, ranks_met, said, begun)

    def _ends_at(self, lead: float) -> float | None:
        """Return the end of the job's time, on the monotonic clock, if the supervisor must signal the ranks.

        Otherwise Slurm signals them itself, with the lead that the job was submitted with.
        """
        if self.scheduler.ends_job_at is not None or lead <= self.spec.stop_before_limit_s:
            return self.scheduler.ends_job_at
        try:
            left = self.scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("cannot determine when the time limit ends: %s", error)
            return None
        return None if left is None else time.monotonic() + left

    def _variables(self, attempt: int, lead: float) -> dict[str, str]:
        spec = self.spec
        variables = {RUN_DIR_VARIABLE: str(self.run.path), ATTEMPT_VARIABLE: str(attempt), **self.grace}
        if STOP_GRACE_VARIABLE in self.grace:
            grace = _GRACE_OF_LIMIT.sub(rf"\g<1>{lead:g}", self.grace[STOP_GRACE_VARIABLE])
            variables[STOP_GRACE_VARIABLE] = grace
        if spec.code is not None:
            variables |= {CODE_VARIABLE: spec.code.copy, CODE_SOURCE_VARIABLE: spec.code.source}
        if spec.array_task is not None:
            variables[ARRAY_TASK_VARIABLE] = str(spec.array_task)
        return variables
