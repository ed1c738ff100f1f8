"""Run an attempt: a rendezvous store, a job step for the ranks, and the monitor."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise

from hpctrain import system
from hpctrain.checkpoint.interval import longest_save_s
from hpctrain.checkpoint.listing import ScriptCheckpointWatcher, describe_unmatched
from hpctrain.cluster import compress_hostlist
from hpctrain.files import file_size
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.record_types import Event, StepRecord
from hpctrain.records.checkpoint_health import record_script_checkpoint, starts_over
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import (
    ARRAY_TASK_VARIABLE,
    CHECKPOINTS_VARIABLE,
    CODE_SOURCE_VARIABLE,
    CODE_VARIABLE,
    CPU_BINDING_VARIABLE,
    INDEPENDENT_RANKS_VARIABLE,
    MICRO_BATCH_VARIABLE,
    VERIFIED_STEP_VARIABLE,
    RunDir,
)
from hpctrain.supervisor.job_control import EARLY_SIGNAL_TOLERANCE_S, JobControl, known_seconds_left
from hpctrain.supervisor.launch.job_step import Launcher, RendezvousStore, StepEvent
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor, AttemptOutcome
from hpctrain.supervisor.workers.batch_launcher import BatchStep
from hpctrain.supervisor.workers.node_steps import Stager
from hpctrain.supervisor.workers.observed_groups import NOTHING_SURVIVED, Survival
from hpctrain.supervisor.workers.worker_group import WorkerGroup
from hpctrain.text import pluralize

log = logging.getLogger(__name__)

#: Grace time of the ranks after the signal before the time limit.
_TIME_LIMIT_GRACE = re.compile(r"(\bSIGUSR2=)[\d.]+")

#: Events before an attempt in the same job.
_RESTARTS = ("restart", "shrink", "replace")


@dataclass(frozen=True)
class AttemptResult:
    attempt: int
    outcome: AttemptOutcome
    monitor: AttemptMonitor
    job_log_offset: int
    """Size of the job log in bytes at the start of the attempt."""
    started_at: float
    world_size: int
    survival: Survival = NOTHING_SURVIVED
    """The failures of its ranks that a batch script has survived."""


@dataclass(frozen=True)
class AttemptRunner:
    run: RunDir
    spec: JobSpec
    launcher: Launcher
    job_control: JobControl
    events: system.SimpleQueue[StepEvent]
    worker_group: WorkerGroup
    grace_variables: Mapping[str, str]
    stager: Stager | None = None

    @property
    def world_size(self) -> int:
        return len(self.launcher.hosts) * self.spec.ntasks_per_node

    def start(self, attempt: int) -> AttemptResult:
        lead = required_lead_s(self.run, self.spec.stop_before_limit_s, self.spec.time_limit_s)
        ends_at = self._ends_at(lead)
        new_monitor = partial(AttemptMonitor, self.events, self.job_control, ends_at, lead)
        hosts, started_at, outcome = self.launcher.hosts, system.time(), AttemptOutcome.DONE
        script_checkpoints = ScriptCheckpointWatcher(self.run.checkpoints, self.spec.checkpoints)
        survival = NOTHING_SURVIVED
        with RendezvousStore(self.launcher.address, hosted=self.spec.torchrun is not None) as rendezvous:
            self._record_start(attempt)
            log_offset = file_size(self.run.slurm_log)
            if self.stager is not None:
                monitor = new_monitor("staging process")
                outcome = self.stager.stage(attempt, hosts, monitor)
            if outcome is AttemptOutcome.DONE:
                variables = partial(self._variables, lead=lead)
                name = "rank" if self.spec.torchrun is None else "agent"
                monitor = new_monitor("batch script" if self.spec.program == "batch" else name)
                step = self.worker_group.start(attempt, rendezvous.variables, variables, self.events.put)
                try:
                    rendezvous.serve()
                    outcome = monitor.wait(step)
                    if isinstance(step, BatchStep):
                        survival = step.survival
                finally:
                    self.worker_group.stop_monitoring()
                    step.close()
        path = script_checkpoints.newest_since()
        if path is not None:
            record_script_checkpoint(self.run, attempt, path, system.time())
        monitor.is_stopping |= self.run.is_asked_to_requeue(attempt)
        size = self.world_size
        return AttemptResult(attempt, outcome, monitor, log_offset, started_at, size, survival)

    def _record_start(self, attempt: int) -> None:
        hosts = self.launcher.hosts
        fields: dict[str, object] = {"nodes": len(hosts), "hosts": hosts}
        program = "the batch script"
        if self.spec.program != "batch":  # which starts any number of ranks
            fields["world_size"], program = self.world_size, pluralize(self.world_size, "rank")
        if starts_over(self.run, self.spec.checkpoints):
            problem = describe_unmatched(self.spec.checkpoints)
            fields |= {"starts_over": True, **({"note": problem} if problem else {})}
            problem = problem or f"no checkpoint in {self.run.checkpoints}"
            log.warning("attempt %d starts over, unless the script saves elsewhere: %s", attempt, problem)
        self.run.log_event("started", attempt, **fields)
        log.info("attempt %d: starting %s on %s", attempt, program, compress_hostlist(hosts))

    def _ends_at(self, lead: float) -> float | None:
        """Return the end of the job's time, on the monotonic clock, if the supervisor must signal the ranks.

        Otherwise, Slurm sends the signal itself, with the lead requested at submission. It sends the signal
        only once, possibly before a restart.
        """
        is_later_signal = lead <= self.spec.stop_before_limit_s
        if self.job_control.ends_job_at is not None or (is_later_signal and not self._is_restart()):
            return self.job_control.ends_job_at
        left_s = known_seconds_left(self.job_control)
        if left_s is None or (is_later_signal and left_s > lead + EARLY_SIGNAL_TOLERANCE_S):
            return None
        return system.monotonic() + left_s

    def _is_restart(self) -> bool:
        kinds = (event.kind for event in reversed(list(self.run.read_events())))
        return next((kind for kind in kinds if kind in (*_RESTARTS, "started")), None) in _RESTARTS

    def _variables(self, attempt: int, lead: float) -> dict[str, str]:
        spec = self.spec
        variables = self.run.attempt_variables(attempt)
        for name, grace in self.grace_variables.items():
            variables[name] = _TIME_LIMIT_GRACE.sub(rf"\g<1>{lead:g}", grace)
        if spec.checkpoints is not None:
            variables[CHECKPOINTS_VARIABLE] = spec.checkpoints
        if spec.code is not None:
            variables |= {CODE_VARIABLE: spec.code.copy, CODE_SOURCE_VARIABLE: spec.code.source}
        history = History.from_events(self.run.read_events())
        if history.micro_batch_size is not None:
            variables[MICRO_BATCH_VARIABLE] = str(history.micro_batch_size)
        if history.resume_limit is not None:
            variables[VERIFIED_STEP_VARIABLE] = str(history.resume_limit)
        if spec.cpu_binding == "none":
            variables[CPU_BINDING_VARIABLE] = "none"
        if spec.independent_ranks:
            variables[INDEPENDENT_RANKS_VARIABLE] = "1"
        if spec.array_task is not None:
            variables[ARRAY_TASK_VARIABLE] = str(spec.array_task)
        return variables


#: The ranks agree on a step while they compute the next step, and complete the latter.
_STEPS = 3
#: Delay of a signal sent through Slurm.
_SIGNAL_S = 10.0
#: Number of newest records to read.
_STEPS_SEEN, _EVENTS_SEEN = 200, 1000


def required_lead_s(run: RunDir, asked_s: float, limit_s: float | None = None) -> float:
    """Return the lead before the time limit: the user's value, or more if the ranks need it to save."""
    saves = [
        event.duration_s
        for event in islice(read_last_records(run.events, Event), _EVENTS_SEEN)
        if event.kind == "checkpoint" and event.duration_s is not None
    ]
    if not saves:
        return asked_s
    newest = list(islice(read_last_records(run.metrics, StepRecord), _STEPS_SEEN))[::-1]
    needed = _SIGNAL_S + _STEPS * longest_step_s(newest) + longest_save_s(max(saves))
    return max(asked_s, needed if limit_s is None else min(needed, limit_s / 2))


def longest_step_s(records: Iterable[StepRecord]) -> float:
    """Return the longest step between consecutive records of an attempt; 0 without records."""
    longest = 0.0
    for before, after in pairwise(records):
        if after.step > before.step and before.attempt == after.attempt:
            longest = max(longest, (after.time - before.time) / (after.step - before.step))
    return longest
