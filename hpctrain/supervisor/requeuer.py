"""Release of an allocation and request for another: a requeue, or a successor job."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.slurm.command import is_transient
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.launch.job_step import StepEvent
from hpctrain.supervisor.policy.job_intent import (
    ContinuationMethod,
    JobDisposition,
    JobIntent,
    continuation_methods,
    resolve_intent,
)

log = logging.getLogger(__name__)

#: After a requeue, wait this long for Slurm to end this process, so that the batch script does not exit
#: first.
_REQUEUE_LIMIT_S = 60.0
#: Retry an unreachable controller for this long: the state is saved and can wait.
_OUT_OF_REACH_S, _PAUSE_S = 3600.0, 5.0


@dataclass(frozen=True)
class RequeueRefused:
    """No other allocation is available."""

    cause: str
    may_pass: bool
    """True if the only problem is that the controller is unreachable."""


@dataclass(frozen=True)
class Requeuer:
    """Continues a run in another allocation."""

    run: RunDir
    spec: JobSpec
    scheduler: JobControl
    events: queue.SimpleQueue[StepEvent]

    def move(
        self, attempt: int, will: JobIntent, kind: EndKind, seconds: float, left_out: Collection[str]
    ) -> int | RequeueRefused | None:
        """Release the allocation and request another.

        Args:
            attempt: the attempt to continue.
            will: the intent for the job.
            kind: how the attempt ended.
            left_out: nodes to exclude.
            seconds: duration of the attempt.

        Returns:
            The job's exit code; None if the run continues in this job.
        """
        ways = continuation_methods(self.spec.resume_mode, will, requeues=self._requeues())
        self.run.log_event("requeue", attempt, seconds=seconds, by=ways[0].value, **{"class": kind})
        deadline = time.monotonic() + _OUT_OF_REACH_S
        while True:
            moved = self._try(ways, attempt, left_out)
            if not (isinstance(moved, RequeueRefused) and moved.may_pass) or time.monotonic() > deadline:
                return moved
            log.warning("cannot reach the controller; retrying in %.0f s", _PAUSE_S)
            # Any signal means that Slurm ends this job, so there is no more time to wait.
            with suppress(queue.Empty):
                self.events.get(timeout=_PAUSE_S)

    def _try(
        self, ways: Sequence[ContinuationMethod], attempt: int, left_out: Collection[str]
    ) -> int | RequeueRefused | None:
        """Try each method once. See `move`."""
        refusals, may_pass = [], False
        for way in ways:
            try:
                if way is ContinuationMethod.SUCCESSOR:
                    log.info("job %s continues the run", self.scheduler.hand_on(attempt, left_out))
                    return EXIT_CONTINUE
                if not self.scheduler.requeue():
                    return None
                self._exclude(left_out)
                return self._wait_for_the_end()
            except SchedulerError as error:
                if self.will() is JobIntent.LEAVE:
                    return EXIT_CONTINUE  # Slurm has already taken over.
                log.warning("the %s failed: %s", way.value, error)
                refusals.append(f"the {way.value} failed: {error}")
                may_pass = may_pass or is_transient(str(error))
        return RequeueRefused("; ".join(refusals), may_pass)

    def save_run(self) -> None:
        """Continue the run in another job although Slurm is about to end this process."""
        attempt = max(self.run.attempts(), default=0)
        for way in (self.scheduler.requeue, lambda: self.scheduler.hand_on(attempt)):
            try:
                way()
                log.warning("the batch script was killed: the run continues in another job")
                return
            except SchedulerError as error:
                log.warning("the batch script was killed: %s", error)

    def will(self, signals: Iterable[Signals] = ()) -> JobIntent:
        """Return the intent for the job, given the signals that its supervisor received."""
        cancelled = self.run.cancel_request.exists() or bool(self.scheduler.cancels.intersection(signals))
        fate = JobDisposition.STAYS
        if not cancelled:
            try:
                fate = self.scheduler.fate()
            except SchedulerError as error:
                log.warning("%s Assuming that the job continues.", error)
        return resolve_intent(cancelled=cancelled, fate=fate, resume_mode=self.spec.resume_mode)

    def _requeues(self) -> bool:
        try:
            return self.scheduler.requeues()
        except SchedulerError as error:
            log.warning("%s Assuming that the site requeues jobs.", error)
            return True

    def _exclude(self, left_out: Collection[str]) -> None:
        """Exclude nodes from the requeued job; on failure, the next start avoids them if it gets them."""
        if not left_out:
            return
        try:
            self.scheduler.exclude(left_out)
        except SchedulerError as error:
            log.warning("the job may start on %s again: %s", ", ".join(left_out), error)

    def _wait_for_the_end(self) -> int:
        """Wait for Slurm to end this process, which it does to requeue the job."""
        log.info("requeued; waiting for Slurm to end this job")
        try:
            self.events.get(timeout=_REQUEUE_LIMIT_S)
        except queue.Empty:
            log.warning("Slurm did not end this job within %.0f s of the requeue", _REQUEUE_LIMIT_S)
        return EXIT_CONTINUE
