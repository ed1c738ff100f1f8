"""The supervisor: starts the workers, learns how they ended, decides what follows, until the run is over."""

from __future__ import annotations

import logging
import queue
import signal
import time
from collections.abc import Mapping
from types import FrameType

from hpctrain.errors import EXIT_CONTINUE, RunFailed, SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.decide import Action, History, Nodes, Outcome, Will, decide
from hpctrain.supervisor.diagnosis import Diagnosis, Diagnostician, in_words
from hpctrain.supervisor.move import Mover, Refused
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.start import Ended, Starter
from hpctrain.supervisor.step import Event, Launcher, Signalled
from hpctrain.supervisor.submission import take_turn

log = logging.getLogger(__name__)


class Supervisor:
    """Sees one job of a run through."""

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        launcher: Launcher,
        scheduler: Scheduler,
        grace: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._spec = run, spec
        self._launcher, self._scheduler = launcher, scheduler
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._starter = Starter(run, spec, launcher, scheduler, self._events, grace or {})
        self._diagnostician = Diagnostician(run, spec, scheduler)
        self._mover = Mover(run, spec, scheduler, self._events)

    def run(self) -> int:
        """Start the workers as often as it takes. Returns the exit code of the job."""
        for number in self._scheduler.on_signal:
            signal.signal(number, self._note_signal)
        if (exit_code := take_turn(self._run, self._spec, self._scheduler)) is not None:
            log.info("the run is complete; nothing is left to do")
            return exit_code
        while True:
            attempt, begun = self._run.new_attempt(), time.monotonic()
            ended = self._starter.start(attempt)
            diagnosis = self._diagnostician.look(ended, self._launcher.hosts)
            will = self._mover.will(ended.watch.signals)
            if (exit_code := self._go_on(ended, diagnosis, will, time.monotonic() - begun)) is not None:
                return exit_code

    def _go_on(self, ended: Ended, diagnosis: Diagnosis, will: Will, seconds: float) -> int | None:
        """Do what follows from an attempt. Returns the job's exit code; None: start the workers again."""
        attempt, outcome = ended.attempt, diagnosis.outcome
        history = History.of(self._run.read_events())
        # Only a crash makes the time left matter, and asking for it is a call to the controller.
        time_is_short = outcome is Outcome.FAILED and self._time_is_short()
        left = [host for host in self._launcher.hosts if host not in diagnosis.lost]
        nodes = Nodes(left=len(left), least=self._spec.min_nodes, lost=len(diagnosis.lost))
        action = decide(
            history, outcome, will, self._spec.max_failures, time_is_short=time_is_short, nodes=nodes
        )
        log.info("attempt %d: %s, %s: %s", attempt, outcome.value, will.value, action.value)
        match action:
            case Action.RESTART:
                self._run.log_event("restart", attempt, cause=diagnosis.cause)
                return None
            case Action.SHRINK:
                self._shrink(attempt, left, diagnosis.lost)
                return None
            case Action.REQUEUE:
                moved = self._mover.move(attempt, will, seconds)
                if isinstance(moved, Refused):
                    return self._finish(attempt, "FAILED", f"the state is saved, but {moved.cause}")
                return moved
            case Action.LEAVE:
                return EXIT_CONTINUE
            case Action.COMPLETE:
                return self._finish(attempt, "COMPLETED", note=self._doubt(ended))
            case Action.CANCEL:
                return self._finish(attempt, "CANCELLED")
            case Action.FAIL:
                return self._finish(attempt, "FAILED", diagnosis.cause or _why(outcome, history))

    def _shrink(self, attempt: int, left: list[str], lost: Mapping[str, str]) -> None:
        """Go on with the nodes that are left, and have Slurm take back the others."""
        launcher = self._launcher
        self._run.log_event(
            "shrink",
            attempt,
            nodes=len(left),
            nodes_before=len(launcher.hosts),
            hosts=left,
            lost=list(lost),
            cause=in_words(lost),
        )
        try:
            self._scheduler.keep(left)
        except SchedulerError as error:
            log.warning("The lost nodes stay with the job, which Slurm may end with them: %s", error)
        launcher.hosts = left

    def _time_is_short(self) -> bool:
        """Whether ranks that start now would be told to stop at once, or were told while none was there."""
        try:
            left = self._scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("%s Taking the time to be enough.", error)
            return False
        return left is not None and left <= self._spec.signal_lead_s

    def _doubt(self, ended: Ended) -> str | None:
        """What is odd about a run that has completed."""
        world_size = self._starter.world_size
        # Where agents start the ranks, these meet at a store of an agent's.
        if world_size == 1 or ended.ranks_met or self._spec.torchrun is not None:
            return None
        return (
            f"none of the {world_size} ranks made a process group. "
            "If they were to train together, each has trained on its own."
        )

    def _finish(self, attempt: int, state: str, cause: str | None = None, note: str | None = None) -> int:
        exit_code = {"COMPLETED": 0, "CANCELLED": 0}.get(state, RunFailed.exit_code)
        more = {"note": note} if note else {}
        self._run.log_event("finished", attempt, state=state, exit_code=exit_code, cause=cause, **more)
        log.info("run %s%s", state, "".join(f": {words}" for words in (cause, note) if words))
        return exit_code

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        # SimpleQueue.put may be interrupted by itself, which is what a signal handler needs.
        self._events.put(Signalled(signal.Signals(number)))


def _why(outcome: Outcome, history: History) -> str:
    if outcome is Outcome.STOPPED:
        return f"{history.stops} stops in a row, each soon after the start and without a new checkpoint"
    return "the ranks did not save and leave before the time limit; submit with a longer --signal-lead"
