"""Release an allocation and request a new one, by a requeue or in a successor job."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

from hpctrain import system
from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.records.run_record import read_run_record
from hpctrain.records.submit_successor import JobChanges
from hpctrain.rundir import RunDir
from hpctrain.slurm.command import is_transient
from hpctrain.supervisor.job_control import JobControl
from hpctrain.supervisor.launch.job_step import StepEvent
from hpctrain.supervisor.policy.job_intent import (
    ContinuationMethod,
    JobDisposition,
    JobIntent,
    continuation_methods,
    resolve_intent,
)

log = logging.getLogger(__name__)

#: Maximum time to wait for Slurm to end this process after a requeue: the batch script must not exit first.
_REQUEUE_LIMIT_S = 60.0
#: Part of Slurm's answer if the job is ending.
_ALREADY_ENDING = "already completing"
#: Time to retry an unreachable controller; the state is already saved.
_UNREACHABLE_TIMEOUT_S, _PAUSE_S = 3600.0, 5.0


@dataclass(frozen=True)
class RequeueRefused:
    cause: str
    is_transient: bool
    """True if the only problem is an unreachable controller."""


@dataclass(frozen=True)
class Requeuer:
    run: RunDir
    spec: JobSpec
    job_control: JobControl
    events: system.SimpleQueue[StepEvent]

    def relocate(
        self, attempt: int, intent: JobIntent, kind: EndKind, seconds: float, changes: JobChanges
    ) -> int | RequeueRefused | None:
        """Request a new allocation after an attempt; return the exit code, or None to continue here."""
        methods = self._methods(intent)
        fields = {"memory": changes.memory} if changes.memory else {}
        fields |= {"by": methods[0].value, "class": kind}
        self.run.log_event("requeue", attempt, seconds=seconds, **fields)
        deadline = system.monotonic() + _UNREACHABLE_TIMEOUT_S
        while True:
            moved = self._try_methods(methods, attempt, changes)
            if not isinstance(moved, RequeueRefused) or not moved.is_transient:
                return moved
            if system.monotonic() > deadline:
                return moved
            log.warning("cannot reach the Slurm controller; retrying in %.0f s", _PAUSE_S)
            # Any signal means that Slurm is ending this job, so there is no more time to wait.
            with suppress(queue.Empty):
                self.events.get(timeout=_PAUSE_S)

    def _methods(self, intent: JobIntent) -> Sequence[ContinuationMethod]:
        if self.job_control.successors is None:
            return (ContinuationMethod.REQUEUE,)
        try:
            can_requeue = self.job_control.can_requeue()
        except SchedulerError as error:
            log.warning("cannot determine whether Slurm can requeue this job (%s); trying it", error)
            can_requeue = True
        return continuation_methods(self.spec.resume_mode, intent, can_requeue=can_requeue)

    def _try_methods(
        self, methods: Sequence[ContinuationMethod], attempt: int, changes: JobChanges
    ) -> int | RequeueRefused | None:
        refusals, may_pass = [], False
        for method in methods:
            try:
                if method is ContinuationMethod.REQUEUE:
                    is_ending = self.job_control.requeue()
                    return self._leave_requeued_job(changes) if is_ending else None
                assert self.job_control.successors is not None
                log.info("job %s will continue the run", self.job_control.successors.submit(attempt, changes))
                return EXIT_CONTINUE
            except SchedulerError as error:
                intent = self.intent()
                is_requeue = method is ContinuationMethod.REQUEUE
                if intent is JobIntent.YIELD:
                    # Slurm has taken over, or has accepted the requeue and ended scontrol before its answer.
                    if is_requeue:
                        self._change(changes)
                    return EXIT_CONTINUE
                if is_requeue and _ALREADY_ENDING in str(error) and intent is not JobIntent.RELOCATE:
                    # Slurm accepted an earlier request whose answer was lost, or ends the job by itself.
                    return self._leave_requeued_job(changes)
                request = "the requeue" if is_requeue else "the submission of a successor job"
                log.warning("%s failed: %s", request, error)
                refusals.append(f"{request} failed: {error}")
                may_pass = may_pass or is_transient(str(error))
        return RequeueRefused("; ".join(refusals), may_pass)

    def _leave_requeued_job(self, changes: JobChanges) -> int:
        """Wait for Slurm to end this process, as it does to requeue the job."""
        self._change(changes)
        log.info("requeued; waiting for Slurm to end this job")
        try:
            self.events.get(timeout=_REQUEUE_LIMIT_S)
        except queue.Empty:
            log.warning("Slurm did not end this job within %.0f s of the requeue; exiting", _REQUEUE_LIMIT_S)
        return EXIT_CONTINUE

    def requeue_orphaned(self) -> None:
        """Continue the run in another job, although Slurm is about to end this process."""
        methods: list[Callable[[], object]] = [self.job_control.requeue]
        if (jobs := self.job_control.successors) is not None:
            methods.append(lambda: jobs.submit(max(self.run.attempts(), default=0), JobChanges()))
        for method in methods:
            # The supervisor may end the run at the same time.
            with suppress(OSError):
                if read_run_record(self.run).finished is not None:
                    return
            try:
                method()
                log.warning("the batch script was killed, but the run will continue")
                return
            except (SchedulerError, OSError) as error:
                log.warning("the batch script was killed, and the run could not be continued: %s", error)

    def intent(self, signals: Iterable[Signals] = ()) -> JobIntent:
        """Return the intent for the job, given the signals that its supervisor received."""
        cancel_signals = self.job_control.cancel_signals.intersection(signals)
        cancelled = self.run.cancel_request.exists() or bool(cancel_signals)
        disposition = JobDisposition.STAYS
        if not cancelled:
            try:
                disposition = self.job_control.disposition()
            except SchedulerError as error:
                log.warning("cannot query the state of this job (%s); assuming that the job continues", error)
        return resolve_intent(cancelled=cancelled, disposition=disposition, resume_mode=self.spec.resume_mode)

    def _change(self, changes: JobChanges) -> None:
        if changes and self.job_control.nodes is not None:
            try:
                self.job_control.nodes.change_job(changes)
            except SchedulerError as error:
                risk = "It may start on the previous nodes, with the previous memory request"
                log.warning("cannot change the requeued job: %s. %s", error, risk)
