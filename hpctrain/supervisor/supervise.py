"""The supervisor: starts the workers, learns how they ended, decides what follows, until the run is over."""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType

from hpctrain.cluster.leftovers import end_leftovers
from hpctrain.errors import EXIT_CONTINUE, RunFailed, SchedulerError
from hpctrain.jobs.restart import Kind
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.crew import Crew
from hpctrain.supervisor.decide import Action, Decision, End, Nodes, State, decide, suspects
from hpctrain.supervisor.diagnosis import Diagnosis, Diagnostician, in_words
from hpctrain.supervisor.grow import Grower
from hpctrain.supervisor.history import History
from hpctrain.supervisor.homecoming import bring_home
from hpctrain.supervisor.move import Mover, Refused
from hpctrain.supervisor.node_check import NodeCheck, is_due
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.start import Ended, Starter
from hpctrain.supervisor.step import Event, Launcher, Signalled
from hpctrain.supervisor.submission import take_turn
from hpctrain.supervisor.will import Will

log = logging.getLogger(__name__)

#: What gives the nodes back.
_GIVES_UP = frozenset({Action.REQUEUE, Action.CANCEL, Action.FAIL})


class Supervisor:
    """Sees one job of a run through."""

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        launcher: Launcher,
        scheduler: Scheduler,
        grace: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._spec = run, spec
        self._launcher, self._scheduler = launcher, scheduler
        self._environ = environ or {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._crew = Crew(run, spec, launcher)
        self._starter = Starter(run, spec, launcher, scheduler, self._events, self._crew, grace or {})
        self._diagnostician = Diagnostician(run, spec, scheduler)
        self._check = NodeCheck(run, spec, launcher)
        self._mover = Mover(run, spec, scheduler, self._events)

    def run(self, deaths: int = 0) -> int:
        """Start the workers as often as it takes. Returns the exit code of the job.

        Args:
            deaths: how many supervisors of this job were killed before.
        """
        for number in self._scheduler.on_signal:
            signal.signal(number, self._note_signal)
        if (exit_code := take_turn(self._run, self._spec, self._scheduler, deaths)) is not None:
            log.info("the run is complete; nothing is left to do")
            return exit_code
        self._leave_out()
        if deaths and (exit_code := self._take_over()) is not None:
            return exit_code
        with self._crew:
            return self._attempts()

    def _attempts(self) -> int:
        last: Kind | None = None
        while True:
            attempt, begun = self._run.new_attempt(), time.monotonic()
            if is_due(self._spec, last) and (end := self._look_at_nodes(attempt)) is not None:
                last, will = end.kind, self._mover.will()
                seconds = time.monotonic() - begun
                if (exit_code := self._go_on(attempt, Diagnosis(end), will, seconds)) is not None:
                    return exit_code
                continue
            with self._grower(attempt):
                ended = self._starter.start(attempt)
            # The ranks of the next attempt look after the other hosts.
            end_leftovers(str(self._run.path), attempt + 1)
            diagnosis = self._diagnostician.look(ended, self._launcher.hosts)
            will, last = self._mover.will(ended.watch.signals), diagnosis.end.kind
            if (
                exit_code := self._go_on(attempt, diagnosis, will, time.monotonic() - begun, ended)
            ) is not None:
                return exit_code

    def _look_at_nodes(self, attempt: int) -> End | None:
        """Why the ranks are not to be started on these nodes, or not now; None where they are."""
        looked = self._check.look(attempt)
        if looked.stopped:
            return End(self._diagnostician.kind_of_stop(attempt))
        if not looked.bad:
            return None
        return self._diagnostician.nodes_at_fault(attempt, looked.bad, self._launcher.hosts)

    def _grower(self, attempt: int) -> Grower:
        nodes = len(self._launcher.hosts)
        return Grower(self._run, self._spec, self._scheduler, self._environ, attempt, nodes)

    def _take_over(self) -> int | None:
        """Go on after a supervisor that was killed, whose ranks may still be there. See `_go_on`."""
        if not (attempts := self._run.attempts()):
            return None
        self._scheduler.end_steps()
        end_leftovers(str(self._run.path), attempts[-1] + 1)
        stop = self._diagnostician.stop_on_record(attempts[-1])
        end = self._diagnostician.supervisor_killed(attempts[-1])
        # Killed when the ranks had left already: what it was about to do is done.
        end = end if stop is None else End(stop)
        return self._go_on(attempts[-1], Diagnosis(end), self._mover.will(), 0.0)

    def _leave_out(self) -> None:
        """Start on other nodes than those that are left out, where some of them were granted again."""
        launcher, excluded = self._launcher, History.of(self._run.read_events()).excluded
        nodes = Nodes(tuple(launcher.hosts), tuple(launcher.spares))
        hosts = list(nodes.usable(excluded))
        if len(hosts) >= self._spec.min_nodes:
            spares = [host for host in launcher.spares if host not in hosts and host not in excluded]
            launcher.hosts, launcher.spares = hosts, spares

    def _go_on(
        self, attempt: int, diagnosis: Diagnosis, will: Will, seconds: float, ended: Ended | None = None
    ) -> int | None:
        """Do what follows from an attempt. Returns the job's exit code; None: start the workers again."""
        end = diagnosis.end
        state, now = self._state(diagnosis, will), time.monotonic()
        decision = decide(state, end, now)
        log.info("attempt %d: %s, %s: %s", attempt, end.kind, will.value, decision)
        if decision.exclude:
            hosts, reason = list(decision.exclude), in_words(decision.exclude)
            self._run.log_event("excluded", attempt, hosts=hosts, reason=reason)
        if decision.action in _GIVES_UP and not end.kind.is_stop:
            bring_home(self._run, self._spec, self._launcher, attempt, diagnosis.lost)
        match decision.action:
            case Action.RESTART:
                self._run.log_event("restart", attempt, cause=end.cause)
                return None
            case Action.SHRINK | Action.REPLACE:
                self._change_nodes(attempt, decision, diagnosis.lost)
                return None
            case Action.REQUEUE:
                left_out = state.history.excluded.union(decision.exclude)
                moved = self._mover.move(attempt, will, end.kind, seconds, left_out)
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
                note = decision.why if end.cause else None
                return self._finish(attempt, "FAILED", end.cause or decision.why, note)

    def _state(self, diagnosis: Diagnosis, will: Will) -> State:
        """Where the run stands. Asks the controller only for what matters: after a failure, that is."""
        policy, history = self._spec.policy, History.of(self._run.read_events())
        state = State(policy, history, will, lead_s=self._spec.signal_lead_s)
        if will in (Will.CANCEL, Will.LEAVE) or diagnosis.end.kind is Kind.DONE:
            return state
        found = suspects(policy, history) if self._scheduler.has_machines else {}
        if not self._scheduler.has_machines:
            state = replace(state, policy=policy.without_exclusions())
        nodes = Nodes(
            in_use=tuple(self._launcher.hosts),
            spare=tuple(self._launcher.spares),
            lost=diagnosis.lost,
            least=self._spec.min_nodes,
            others_fit=bool(found) and self._scheduler.others_fit(history.excluded.union(found)),
        )
        ends_at = None if diagnosis.end.kind.is_stop else self._ends_at()
        return replace(state, nodes=nodes, ends_at=ends_at)

    def _change_nodes(self, attempt: int, decision: Decision, lost: Mapping[str, str]) -> None:
        """Go on with other nodes of the allocation, and have Slurm take back those that are lost."""
        launcher = self._launcher
        before, hosts = launcher.hosts, list(decision.hosts)
        gone = {**lost, **decision.exclude}
        self._run.log_event(
            "shrink" if decision.action is Action.SHRINK else "replace",
            attempt,
            nodes=len(hosts),
            nodes_before=len(before),
            hosts=hosts,
            lost=[host for host in before if host not in hosts],
            cause=in_words(gone),
        )
        spares = [host for host in launcher.spares if host not in hosts and host not in gone]
        if lost:
            try:
                self._scheduler.keep([*hosts, *spares])
            except SchedulerError as error:
                log.warning("The lost nodes stay with the job, which Slurm may end with them: %s", error)
        launcher.hosts, launcher.spares = hosts, spares

    def _ends_at(self) -> float | None:
        """When the job's time is over, on the monotonic clock."""
        try:
            left = self._scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("%s Taking the time to be enough.", error)
            return None
        return None if left is None else time.monotonic() + left

    def _doubt(self, ended: Ended | None) -> str | None:
        """What is odd about a run that has completed."""
        world_size = self._starter.world_size
        # Where agents start the ranks, these meet at a store of an agent's.
        if world_size == 1 or ended is None or ended.ranks_met or self._spec.torchrun is not None:
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

    def leave_orphaned(self, _number: int, _frame: FrameType | None) -> None:
        """The batch script was killed, and Slurm ends the job: have the run go on in another."""
        threading.Thread(target=self._mover.save_run, name="hpctrain-orphaned").start()

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        # SimpleQueue.put may be interrupted by itself, which is what a signal handler needs.
        self._events.put(Signalled(signal.Signals(number)))
