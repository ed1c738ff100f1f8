"""One start of the workers, watched to its end."""

from __future__ import annotations

import logging
import math
import queue
import signal
import time
from dataclasses import dataclass, field

from hpctrain.errors import SchedulerError
from hpctrain.supervisor.outcome import Outcome
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.step import (
    Ending,
    Event,
    Hung,
    Signalled,
    Step,
    StepEnded,
    Straggling,
    TaskExit,
    Unended,
)

log = logging.getLogger(__name__)

#: After the first failure the other ranks have this long to say what they saw; then they are ended.
_LAST_WORDS_S = 3.0
#: After the first rank left to be continued, the others have this long to follow: their state is saved.
_FOLLOW_S = 60.0
#: Ending the step and putting the job back into the queue takes less.
_REQUEUE_S = 12.0
#: Ranks leave one after the other, however late it is.
_LEAST_FOLLOW_S = 2.0
#: Ranks that are told to stop have this long to save, where no scheduler sets a limit.
STOP_GRACE_S = 300.0
#: Ranks of a cancelled run have this long; a second request to cancel ends them at once.
CANCEL_GRACE_S = 60.0
#: A step that was ended by force must be gone by then.
_KILL_LIMIT_S = 60.0


@dataclass
class Watch:
    """Waits for the end of a step, and brings it about where it does not come."""

    events: queue.SimpleQueue[Event]
    scheduler: Scheduler
    ends_at: float | None
    """When the job's time is over, on the monotonic clock; None where the scheduler sees to that."""
    signal_lead_s: float
    """Seconds before `ends_at` at which the ranks are told."""
    process: str = "rank"
    """What a process of the step is."""
    exits: list[TaskExit] = field(default_factory=list)
    """Processes that ended by themselves, in the order in which it was noticed."""
    signals: list[signal.Signals] = field(default_factory=list)
    """Signals that the supervisor got."""
    hung: Hung | None = None
    """Why the step was ended, where it hung."""
    stragglers: list[Straggling] = field(default_factory=list)
    """Ranks that were slow, as it was noticed."""
    end: StepEnded | None = None
    out_of_time: bool = False
    _deadline: float | None = None
    _awaited: str = ""
    _killed: bool = False
    _warned: bool = False

    def until_end(self, step: Step) -> Outcome:
        """Wait until `step` is over, and tell how it ended.

        Raises:
            TimeoutError: the step was killed and did not end.
        """
        while self.end is None:
            try:
                event = self.events.get(timeout=self._time_left())
            except queue.Empty:
                self._time_is_up(step)
            else:
                self._handle(event, step)
        return self._outcome()

    def _handle(self, event: Event, step: Step) -> None:
        match event:
            case StepEnded():
                self.end = event
            case TaskExit():
                self._task_ended(event)
            case Straggling():
                self.stragglers.append(event)
            case Hung():
                if not self._killed:
                    self.hung = event
                    log.error("%s", event.cause)
                    self._kill(step)
            case Unended():
                if not self._killed:
                    log.warning(
                        "all %ss are gone, and the step does not end: ending its launcher", self.process
                    )
                    self._kill(step)
            case Signalled(number):
                self.signals.append(number)
                forward = self.scheduler.on_signal.get(number)
                log.info("got %s%s", number.name, f"; sending {forward.name} to the ranks" if forward else "")
                if self._killed or forward is None:
                    return
                cancels = [got for got in self.signals if got in self.scheduler.cancels]
                if len(cancels) > 1 and number in cancels:
                    log.info("asked to end a second time: ending the step")
                    self._kill(step)
                    return
                self._tell(step, forward)
                grace = CANCEL_GRACE_S if cancels else STOP_GRACE_S
                self._limit(grace, f"the ranks to stop after {number.name}")

    def _task_ended(self, task: TaskExit) -> None:
        self.exits.append(task)
        name = f"{self.process} {task.rank}"
        log.info("%s %s", name, task)
        if task.ending is Ending.FAILED:
            self._limit(_LAST_WORDS_S, f"the other ranks' last words after {name} failed")
        elif task.ending is Ending.CONTINUE:
            follow_s = min(_FOLLOW_S, self._left_to_requeue_s())
            self._limit(follow_s, f"the other ranks to leave as {name} did")

    def _left_to_requeue_s(self) -> float:
        """How long ranks may be waited for if the job is to be requeued before its time is over."""
        try:
            left = self.scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("%s Taking the time to be enough.", error)
            return math.inf
        return math.inf if left is None else max(_LEAST_FOLLOW_S, left - _REQUEUE_S)

    def _limit(self, seconds: float, awaited: str) -> None:
        """Wait `seconds` at the most from now on. An earlier limit stands."""
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline:
            self._deadline, self._awaited = deadline, awaited

    def _time_left(self) -> float | None:
        moments = [self._deadline]
        if self.ends_at is not None and not self._killed:
            moments.append(self.ends_at if self._warned else self.ends_at - self.signal_lead_s)
        known = [moment for moment in moments if moment is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _time_is_up(self, step: Step) -> None:
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            if self._killed:
                raise TimeoutError(f"the step was killed, but is still there after {_KILL_LIMIT_S:.0f} s.")
            log.info("done waiting for %s: ending the step", self._awaited)
            self._kill(step)
        elif self.ends_at is not None and now >= self.ends_at - self.signal_lead_s:
            if not self._warned:
                self._warned = True
                log.info(
                    "%.0f s are left of the time limit: sending SIGUSR2 to the ranks", self.signal_lead_s
                )
                self._tell(step, signal.SIGUSR2)
            elif now >= self.ends_at:
                log.info("the time limit is reached: ending the step")
                self.out_of_time = True
                self._kill(step)

    def _tell(self, step: Step, number: signal.Signals) -> None:
        """Where the controller is out of reach, there is still the signal that Slurm itself sends."""
        try:
            step.signal(number)
        except SchedulerError as error:
            log.warning("the ranks cannot be told: %s", error)

    def _kill(self, step: Step) -> None:
        self._killed = True
        self._deadline = time.monotonic() + _KILL_LIMIT_S
        step.kill()

    def _outcome(self) -> Outcome:
        assert self.end is not None
        if self.out_of_time:
            return Outcome.OUT_OF_TIME
        endings = {task.ending for task in self.exits}
        if Ending.FAILED in endings:
            return Outcome.FAILED
        if Ending.CONTINUE in endings or (self._killed and self.signals):
            return Outcome.STOPPED
        if self.end.returncode == 0:
            return Outcome.DONE
        return Outcome.FAILED if self.exits or self._killed else Outcome.NOT_STARTED
