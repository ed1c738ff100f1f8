"""One start of the ranks: a store at which they meet, a step that they are in, and the watch over it."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from hpctrain.errors import SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.last_words import size_of
from hpctrain.rundir import (
    ARRAY_TASK_VARIABLE,
    ATTEMPT_VARIABLE,
    CODE_SOURCE_VARIABLE,
    CODE_VARIABLE,
    RUN_DIR_VARIABLE,
    STOP_GRACE_VARIABLE,
    RunDir,
)
from hpctrain.supervisor.attempt import Watch
from hpctrain.supervisor.crew import Crew
from hpctrain.supervisor.lead import lead_s
from hpctrain.supervisor.outcome import Outcome
from hpctrain.supervisor.rendezvous import Rendezvous
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.script_checkpoints import ScriptCheckpoints
from hpctrain.supervisor.step import Event, Launcher

log = logging.getLogger(__name__)

#: What the ranks are told of the time that the signal before the limit leaves.
_GRACE_OF_LIMIT = re.compile(r"(\bSIGUSR2=)[\d.]+")


@dataclass(frozen=True)
class Ended:
    """A start of the ranks that is over."""

    attempt: int
    outcome: Outcome
    watch: Watch
    ranks_met: bool
    """Whether the ranks have used the store."""
    said: int
    """How long the job's own log was, in bytes, when the attempt began."""
    begun: float = 0.0
    """When the attempt began, in seconds since the epoch."""


@dataclass(frozen=True)
class Starter:
    """Starts the ranks of a run on the nodes that the launcher has."""

    run: RunDir
    spec: JobSpec
    launcher: Launcher
    scheduler: Scheduler
    events: queue.SimpleQueue[Event]
    crew: Crew
    grace: Mapping[str, str]
    """Variables that tell the ranks how long each signal leaves them."""

    @property
    def world_size(self) -> int:
        """The number of ranks on the nodes that the job has now."""
        return len(self.launcher.hosts) * self.spec.tasks_per_node

    def start(self, attempt: int) -> Ended:
        """Start the ranks and watch them to their end."""
        lead = lead_s(self.run, self.spec.signal_lead_s, self.spec.time_limit_s)
        watch = Watch(
            events=self.events,
            scheduler=self.scheduler,
            ends_at=self._ends_at(lead),
            signal_lead_s=lead,
            process="rank" if self.spec.torchrun is None else "agent",
        )
        hosts, begun = self.launcher.hosts, time.time()
        scripts_own = ScriptCheckpoints(self.run.checkpoints)
        with Rendezvous(self.launcher.address) as rendezvous:
            self.run.log_event("started", attempt, nodes=len(hosts), world_size=self.world_size, hosts=hosts)
            said = size_of(self.run.slurm_log)
            log.info("attempt %d: starting %d ranks on %s", attempt, self.world_size, hosts)
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
        return Ended(attempt, outcome, watch, ranks_met, said, begun)

    def _ends_at(self, lead: float) -> float | None:
        """When the job's time is over, where the supervisor has to tell the ranks; on the monotonic clock.

        Slurm tells them itself, at the lead that the job was submitted with.
        """
        if self.scheduler.ends_job_at is not None or lead <= self.spec.signal_lead_s:
            return self.scheduler.ends_job_at
        try:
            left = self.scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("when the job's time is over cannot be told: %s", error)
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
