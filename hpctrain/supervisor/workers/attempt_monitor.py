"""Watch one attempt from its start to its end."""

from __future__ import annotations

import logging
import math
import queue
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.slurm.srun_step import StepEnded, TaskExit, TaskResult
from hpctrain.supervisor.job_control import EARLY_SIGNAL_TOLERANCE_S, JobControl, known_seconds_left
from hpctrain.supervisor.launch.job_step import (
    HangDetected,
    JobStep,
    LauncherStuck,
    RankSignalled,
    SignalReceived,
    StepEvent,
    StopRequested,
)

log = logging.getLogger(__name__)

#: Time for the other ranks to report their errors after the first failure, before they are killed.
_FAILURE_GRACE_S = 3.0
#: Time for the other ranks to exit after the first rank saved its state and exited.
_EXIT_GRACE_S = 60.0
#: Upper bound for ending the step and requeueing the job.
_REQUEUE_S = 12.0
#: Minimum time to wait for the other ranks, because ranks exit one after the other.
_MIN_EXIT_GRACE_S = 2.0
#: Time for ranks to save after a stop signal if no scheduler sets a limit.
STOP_GRACE_S = 300.0
#: Time for saving before the run leaves nodes, in seconds. The ranks assume no limit under Slurm.
_LEAVE_GRACE_S = 3600.0
#: Time for ranks of a cancelled run to exit; a second cancel request kills them immediately.
CANCEL_GRACE_S = 60.0
#: A later wake-up means that the job was suspended.
_PAUSE_S = 10.0
#: Time limit for the end of a killed step.
_KILL_LIMIT_S = 60.0


class AttemptOutcome(Enum):
    DONE = "done"
    STOPPED = "stopped"
    """The ranks received a stop signal and exited; the run continues later."""
    FAILED = "failed"
    NOT_STARTED = "not started"
    """The scheduler did not start the step, for example because a node is broken."""
    OUT_OF_TIME = "out of time"
    """The ranks did not exit before the time limit."""


@dataclass
class AttemptMonitor:
    """Waits for the end of a step, and ends it if necessary."""

    events: system.SimpleQueue[StepEvent]
    job_control: JobControl
    ends_at: float | None
    """End of the job's time on the monotonic clock; None if the scheduler enforces it."""
    stop_before_limit_s: float
    """Seconds before `ends_at` at which the ranks receive the signal."""
    process_name: str = "rank"
    exits: list[TaskExit] = field(default_factory=list)
    """Processes that exited by themselves, in order of detection."""
    signals: list[signal.Signals] = field(default_factory=list)
    hang: HangDetected | None = None
    draining: Mapping[str, str] = field(default_factory=dict)
    """Nodes that caused the ranks to be stopped, with the reason."""
    end: StepEnded | None = None
    out_of_time: bool = False
    is_stopping: bool = False
    """True if the ranks were asked to stop before the first of them failed, and may still be stopping."""
    _stop_ends_at: float = math.inf
    _deadline: float | None = None
    _awaited: str = ""
    _killed: bool = False
    _warned: bool = False
    _is_leaving: bool = False

    @property
    def was_signalled(self) -> bool:
        """True if the supervisor received a signal, or the time limit is near."""
        return bool(self.signals) or self._warned

    def wait(self, step: JobStep) -> AttemptOutcome:
        while self.end is None:
            timeout_s, begun = self._time_left(), system.monotonic()
            if timeout_s is not None:
                timeout_s = min(timeout_s, _PAUSE_S)
            event = None
            with suppress(queue.Empty):
                event = self.events.get(timeout=timeout_s)
            if timeout_s is not None and (late_s := system.monotonic() - begun - timeout_s) > _PAUSE_S:
                # This job, and thus the ranks, were suspended.
                self._stop_ends_at += late_s
                if self._deadline is not None:
                    self._deadline += late_s
            if self._deadline is None and system.monotonic() >= self._stop_ends_at:
                # The script may have handled the signal by saving, and continues its training.
                self.is_stopping, self._stop_ends_at = False, math.inf
            if event is None:
                self._on_time_limit(step)
            else:
                self._handle(event, step)
        return self._outcome()

    def _handle(self, event: StepEvent, step: JobStep) -> None:
        match event:
            case StepEnded():
                self.end = event
            case TaskExit():
                self._task_ended(event)
            case HangDetected():
                if not self._killed:
                    self.hang = event
                    log.error("%s", event.cause)
                    self._kill(step)
            case StopRequested(reason, draining):
                if not self._killed:
                    self._begin_stop()
                    self.draining = draining
                    self.signals.append(signal.SIGTERM)
                    log.info("stopping the ranks: %s", reason)
                    self._signal_ranks(step, signal.SIGTERM)
                    self._limit(_LEAVE_GRACE_S if draining else STOP_GRACE_S, "the ranks to stop")
            case LauncherStuck():
                if not self._killed:
                    log.warning("all %ss have exited, but not the launcher: killing it", self.process_name)
                    self._kill(step)
            case RankSignalled(rank, name):
                if not self.is_stopping:
                    log.info("%s %d received %s", self.process_name, rank, name)
                self._begin_stop()
            case SignalReceived(number):
                self._begin_stop()
                self.signals.append(number)
                forward = self.job_control.on_signal.get(number)
                reaction = f"; sending {forward.name} to the ranks" if forward else ""
                log.info("received %s%s", number.name, reaction)
                if self._killed or forward is None:
                    return
                cancels = [past for past in self.signals if past in self.job_control.cancel_signals]
                if len(cancels) > 1 and number in cancels:
                    log.info("received a second cancel request: ending the job step")
                    self._kill(step)
                    return
                self._signal_ranks(step, forward)
                grace = CANCEL_GRACE_S if cancels else STOP_GRACE_S
                if self.job_control.nodes is not None:
                    # Of an adopted batch script: the job may have more time, or end soon anyway.
                    grace = min(grace, max(CANCEL_GRACE_S / 2, self._left_to_requeue_s()))
                self._limit(grace, f"the ranks to stop after {number.name}")

    def _begin_stop(self) -> None:
        """Note a stop request, unless a rank has failed before, or the supervisor itself ends the ranks."""
        if not self._killed and all(task.result is not TaskResult.FAILED for task in self.exits):
            self.is_stopping = True
            grace_s = max(STOP_GRACE_S, self.stop_before_limit_s + EARLY_SIGNAL_TOLERANCE_S)
            self._stop_ends_at = system.monotonic() + grace_s

    def _task_ended(self, task: TaskExit) -> None:
        if task.result is TaskResult.CONTINUE:
            self._begin_stop()
        self.exits.append(task)
        name = self.process_name
        if name != "batch script":
            name += f" {task.rank}"
        log.info("%s %s", name, task)
        if task.result is TaskResult.FAILED:
            self._limit(_FAILURE_GRACE_S, f"the other ranks to report errors after {name} failed")
        elif task.result is TaskResult.CONTINUE and not self._is_leaving:
            # Only once: with many ranks, a query for each would delay the requeue.
            self._is_leaving = True
            follow_s = min(_EXIT_GRACE_S, self._left_to_requeue_s())
            self._limit(follow_s, f"the other ranks to exit after {name} exited")

    def _left_to_requeue_s(self) -> float:
        """Return the maximum time to wait for ranks that leaves enough time to requeue the job."""
        left_s = known_seconds_left(self.job_control)
        return math.inf if left_s is None else max(_MIN_EXIT_GRACE_S, left_s - _REQUEUE_S)

    def _limit(self, seconds: float, awaited: str) -> None:
        """Wait at most `seconds` from now on. An earlier deadline, or that of a killed step, is kept."""
        deadline = system.monotonic() + seconds
        if not self._killed and (self._deadline is None or deadline < self._deadline):
            self._deadline, self._awaited = deadline, awaited

    def _time_left(self) -> float | None:
        moments = [self._deadline]
        if self._deadline is None and self.is_stopping:
            moments.append(self._stop_ends_at)
        if self.ends_at is not None and not self._killed:
            moments.append(self.ends_at if self._warned else self.ends_at - self.stop_before_limit_s)
        deadlines = [moment for moment in moments if moment is not None]
        return max(0.0, min(deadlines) - system.monotonic()) if deadlines else None

    def _on_time_limit(self, step: JobStep) -> None:
        now = system.monotonic()
        if self._deadline is not None and now >= self._deadline:
            if self._killed:
                raise TimeoutError(f"the job step is still running {_KILL_LIMIT_S:.0f} s after it was killed")
            log.info("timed out waiting for %s: ending the job step", self._awaited)
            self._kill(step)
        elif self.ends_at is not None and now >= self.ends_at - self.stop_before_limit_s:
            if not self._warned:
                self._warned = True
                self._begin_stop()
                lead_s = self.stop_before_limit_s
                log.info("%.0f s left until the time limit: sending SIGUSR2 to the ranks", lead_s)
                self._signal_ranks(step, signal.SIGUSR2)
            elif now >= self.ends_at:
                log.info("time limit reached: ending the job step")
                self.out_of_time = True
                self._kill(step)

    def _signal_ranks(self, step: JobStep, number: signal.Signals) -> None:
        """Send a signal to the ranks; if the controller is unreachable, Slurm still sends its own signal."""
        try:
            step.signal(number)
        except SchedulerError as error:
            log.warning("cannot signal the ranks: %s", error)

    def _kill(self, step: JobStep) -> None:
        self._killed = True
        self._deadline = system.monotonic() + _KILL_LIMIT_S
        step.kill()

    def _outcome(self) -> AttemptOutcome:
        assert self.end is not None
        if self.out_of_time:
            return AttemptOutcome.OUT_OF_TIME
        endings = {task.result for task in self.exits}
        if TaskResult.FAILED in endings:
            return AttemptOutcome.FAILED
        if TaskResult.CONTINUE in endings or (self._killed and self.is_stopping):
            return AttemptOutcome.STOPPED
        if self.end.returncode == 0:
            return AttemptOutcome.DONE
        return AttemptOutcome.FAILED if self.exits or self._killed else AttemptOutcome.NOT_STARTED
