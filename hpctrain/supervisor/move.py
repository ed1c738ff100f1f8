"""Giving an allocation back and asking for another: a requeue, or a successor job."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.jobs.restart import Kind
from hpctrain.jobs.slurm_command import may_succeed_later
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.step import Event
from hpctrain.supervisor.will import Fate, Way, Will, ways_on, will_of

log = logging.getLogger(__name__)

#: After a requeue Slurm ends this process, which waits for that, lest the batch script end by itself.
_REQUEUE_LIMIT_S = 60.0
#: A controller that is out of reach is asked again for so long: the state is saved, and waits as well.
_OUT_OF_REACH_S, _PAUSE_S = 3600.0, 5.0


@dataclass(frozen=True)
class Refused:
    """No other allocation is to be had."""

    cause: str
    may_pass: bool
    """Whether it was only that the controller is out of reach."""


@dataclass(frozen=True)
class Mover:
    """Has a run go on in another allocation."""

    run: RunDir
    spec: JobSpec
    scheduler: Scheduler
    events: queue.SimpleQueue[Event]

    def move(
        self, attempt: int, will: Will, kind: Kind, seconds: float, left_out: Collection[str]
    ) -> int | Refused | None:
        """Give the allocation back and ask for another.

        Args:
            attempt: the start of the ranks that is to be continued.
            will: what is wanted with the job.
            kind: how that ended.
            left_out: nodes on which the run is not to go on.
            seconds: how long that attempt lasted.

        Returns:
            The job's exit code; None where the run goes on here.
        """
        ways = ways_on(self.spec.continue_by, will, requeues=self._requeues())
        self.run.log_event("requeue", attempt, seconds=seconds, by=ways[0].value, **{"class": kind})
        deadline = time.monotonic() + _OUT_OF_REACH_S
        while True:
            moved = self._try(ways, attempt, left_out)
            if not (isinstance(moved, Refused) and moved.may_pass) or time.monotonic() > deadline:
                return moved
            log.warning("the controller is out of reach; asking again in %.0f s", _PAUSE_S)
            # Whatever signal comes says that Slurm ends this job: then there is no more time to wait.
            with suppress(queue.Empty):
                self.events.get(timeout=_PAUSE_S)

    def _try(self, ways: Sequence[Way], attempt: int, left_out: Collection[str]) -> int | Refused | None:
        """Try each of the ways once. See `move`."""
        refusals, may_pass = [], False
        for way in ways:
            try:
                if way is Way.SUCCESSOR:
                    log.info("job %s continues the run", self.scheduler.hand_on(attempt, left_out))
                    return EXIT_CONTINUE
                if not self.scheduler.requeue():
                    return None
                self._exclude(left_out)
                return self._wait_for_the_end()
            except SchedulerError as error:
                if self.will() is Will.LEAVE:
                    return EXIT_CONTINUE  # Slurm was faster, and has taken over.
                log.warning("no %s: %s", way.value, error)
                refusals.append(f"the {way.value} failed: {error}")
                may_pass = may_pass or may_succeed_later(str(error))
        return Refused("; ".join(refusals), may_pass)

    def save_run(self) -> None:
        """Have the run go on though Slurm is about to end this process: without another word to anybody."""
        attempt = max(self.run.attempts(), default=0)
        for way in (self.scheduler.requeue, lambda: self.scheduler.hand_on(attempt)):
            try:
                way()
                log.warning("the batch script was killed: the run goes on in another job")
                return
            except SchedulerError as error:
                log.warning("the batch script was killed: %s", error)

    def will(self, signals: Iterable[Signals] = ()) -> Will:
        """What is wanted with the job, of whose supervisor these are the signals."""
        cancelled = self.run.cancel_request.exists() or bool(self.scheduler.cancels.intersection(signals))
        fate = Fate.STAYS
        if not cancelled:
            try:
                fate = self.scheduler.fate()
            except SchedulerError as error:
                log.warning("%s Taking the job for one that goes on.", error)
        return will_of(cancelled=cancelled, fate=fate, continue_by=self.spec.continue_by)

    def _requeues(self) -> bool:
        try:
            return self.scheduler.requeues()
        except SchedulerError as error:
            log.warning("%s Taking the site for one that requeues.", error)
            return True

    def _exclude(self, left_out: Collection[str]) -> None:
        """Where this fails, the next start leaves these nodes out if it gets them."""
        if not left_out:
            return
        try:
            self.scheduler.exclude(left_out)
        except SchedulerError as error:
            log.warning("The job may start again on %s: %s", ", ".join(left_out), error)

    def _wait_for_the_end(self) -> int:
        """Wait for Slurm to end this process, which it does to requeue the job."""
        log.info("requeued; waiting for Slurm to end this job")
        try:
            self.events.get(timeout=_REQUEUE_LIMIT_S)
        except queue.Empty:
            log.warning("Slurm has not ended this job within %.0f s of its requeue", _REQUEUE_LIMIT_S)
        return EXIT_CONTINUE
