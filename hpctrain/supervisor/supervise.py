"""The supervisor: starts the workers, finds out how they ended, and decides what follows."""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import FrameType

from hpctrain.cluster.orphans import kill_orphans
from hpctrain.errors import EXIT_CONTINUE, RunFailed, SchedulerError
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, is_metrics
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.acquire_run import acquire_run
from hpctrain.supervisor.drain_step import drain_local_tier
from hpctrain.supervisor.failures.diagnosis import Diagnosis, FailureAnalyzer, describe_nodes
from hpctrain.supervisor.job_control.base import JobControl
from hpctrain.supervisor.launch.job_step import Launcher, SignalReceived, StepEvent
from hpctrain.supervisor.node_check_step import NodeCheckRunner, node_check_is_due
from hpctrain.supervisor.policy.decide import (
    Action,
    Allocation,
    AttemptEnd,
    Decision,
    RunSituation,
    decide,
    suspect_nodes,
)
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.policy.job_intent import JobIntent
from hpctrain.supervisor.requeuer import Requeuer, RequeueRefused
from hpctrain.supervisor.scale_up import ScaleUpMonitor
from hpctrain.supervisor.workers.attempt_runner import AttemptResult, AttemptRunner
from hpctrain.supervisor.workers.worker_group import WorkerGroup
from hpctrain.text import format_number

log = logging.getLogger(__name__)

#: Number of metrics.jsonl records searched for a loss; those of a validation may have none.
_RECORDS_SEARCHED = 100
#: Actions that release the nodes.
_GIVES_UP = frozenset({Action.REQUEUE, Action.CANCEL, Action.FAIL})


class Supervisor:
    """Supervises one job of a run."""

    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        launcher: Launcher,
        scheduler: JobControl,
        grace: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._run, self._spec = run, spec
        self._launcher, self._scheduler = launcher, scheduler
        self._environ = environ or {}
        self._events: queue.SimpleQueue[StepEvent] = queue.SimpleQueue()
        self._crew = WorkerGroup(run, spec, launcher)
        self._starter = AttemptRunner(run, spec, launcher, scheduler, self._events, self._crew, grace or {})
        self._diagnostician = FailureAnalyzer(run, spec, scheduler)
        self._check = NodeCheckRunner(run, spec, launcher)
        self._mover = Requeuer(run, spec, scheduler, self._events)

    def run(self, deaths: int = 0) -> int:
        """Start the workers as often as needed. Returns the exit code of the job.

        Args:
            deaths: number of supervisors of this job that were killed before.
        """
        for number in self._scheduler.on_signal:
            signal.signal(number, self._note_signal)
        if (exit_code := acquire_run(self._run, self._spec, self._scheduler, deaths)) is not None:
            log.info("the run is already complete; nothing to do")
            return exit_code
        self._leave_out()
        if deaths and (exit_code := self._take_over()) is not None:
            return exit_code
        with self._crew:
            return self._attempts()

    def _attempts(self) -> int:
        last: EndKind | None = None
        while True:
            attempt, begun = self._run.new_attempt(), time.monotonic()
            if node_check_is_due(self._spec, last) and (end := self._look_at_nodes(attempt)) is not None:
                last, will = end.kind, self._mover.will()
                seconds = time.monotonic() - begun
                if (exit_code := self._go_on(attempt, Diagnosis(end), will, seconds)) is not None:
                    return exit_code
                continue
            with self._grower(attempt):
                ended = self._starter.start(attempt)
            # The ranks of the next attempt kill orphans on the other hosts.
            kill_orphans(str(self._run.path), attempt + 1)
            diagnosis = self._diagnostician.look(ended, self._launcher.hosts)
            will, last = self._mover.will(ended.watch.signals), diagnosis.end.kind
            if (
                exit_code := self._go_on(attempt, diagnosis, will, time.monotonic() - begun, ended)
            ) is not None:
                return exit_code

    def _look_at_nodes(self, attempt: int) -> AttemptEnd | None:
        """Return why the ranks cannot start on these nodes, or must not start now; None if they can."""
        looked = self._check.look(attempt)
        if looked.stopped:
            return AttemptEnd(self._diagnostician.kind_of_stop(attempt))
        if not looked.bad:
            return None
        return self._diagnostician.nodes_at_fault(attempt, looked.bad, self._launcher.hosts)

    def _grower(self, attempt: int) -> ScaleUpMonitor:
        nodes = len(self._launcher.hosts)
        return ScaleUpMonitor(self._run, self._spec, self._scheduler, self._environ, attempt, nodes)

    def _take_over(self) -> int | None:
        """Continue after a killed supervisor, whose ranks may still run. See `_go_on`."""
        if not (attempts := self._run.attempts()):
            return None
        self._scheduler.end_steps()
        kill_orphans(str(self._run.path), attempts[-1] + 1)
        stop = self._diagnostician.stop_on_record(attempts[-1])
        end = self._diagnostician.supervisor_killed(attempts[-1])
        # If the supervisor was killed after the ranks had left, complete what it had recorded.
        end = end if stop is None else AttemptEnd(stop)
        return self._go_on(attempts[-1], Diagnosis(end), self._mover.will(), 0.0)

    def _leave_out(self) -> None:
        """Start on nodes that are not excluded, if the allocation has enough of them."""
        launcher, excluded = self._launcher, History.of(self._run.read_events()).excluded
        nodes = Allocation(tuple(launcher.hosts), tuple(launcher.spares))
        hosts = list(nodes.usable(excluded))
        if len(hosts) >= self._spec.min_nodes:
            spares = [host for host in launcher.spares if host not in hosts and host not in excluded]
            launcher.hosts, launcher.spares = hosts, spares

    def _go_on(
        self,
        attempt: int,
        diagnosis: Diagnosis,
        will: JobIntent,
        seconds: float,
        ended: AttemptResult | None = None,
    ) -> int | None:
        """Carry out the decision after an attempt. Returns the job's exit code; None for another start."""
        end = diagnosis.end
        state, now = replace(self._state(diagnosis, will), seconds=seconds), time.monotonic()
        decision = decide(state, end, now)
        log.info("attempt %d ended (%s): %s", attempt, end.kind, decision)
        if decision.exclude:
            hosts, reason = list(decision.exclude), describe_nodes(decision.exclude)
            self._run.log_event("excluded", attempt, hosts=hosts, reason=reason)
        if decision.action in _GIVES_UP and not end.kind.is_stop:
            drain_local_tier(self._run, self._spec, self._launcher, attempt, diagnosis.lost)
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
                if isinstance(moved, RequeueRefused):
                    return self._finish(attempt, "FAILED", f"the checkpoint is saved, but {moved.cause}")
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

    def _state(self, diagnosis: Diagnosis, will: JobIntent) -> RunSituation:
        """Return the state of the run; query the controller only if the decision needs it."""
        policy, history = self._spec.policy, History.of(self._run.read_events())
        state = RunSituation(policy, history, will, lead_s=self._spec.stop_before_limit_s)
        if will in (JobIntent.CANCEL, JobIntent.LEAVE) or diagnosis.end.kind is EndKind.DONE:
            return state
        found = suspect_nodes(policy, history) if self._scheduler.has_machines else {}
        if not self._scheduler.has_machines:
            state = replace(state, policy=policy.without_exclusions())
        nodes = Allocation(
            in_use=tuple(self._launcher.hosts),
            spare=tuple(self._launcher.spares),
            lost=diagnosis.lost,
            least=self._spec.min_nodes,
            others_fit=bool(found) and self._scheduler.others_fit(history.excluded.union(found)),
        )
        ends_at = None if diagnosis.end.kind.is_stop else self._ends_at()
        return replace(state, nodes=nodes, ends_at=ends_at)

    def _change_nodes(self, attempt: int, decision: Decision, lost: Mapping[str, str]) -> None:
        """Continue on other nodes of the allocation, and return lost nodes to Slurm."""
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
            cause=describe_nodes(gone),
        )
        spares = [host for host in launcher.spares if host not in hosts and host not in gone]
        if lost:
            try:
                self._scheduler.keep([*hosts, *spares])
            except SchedulerError as error:
                log.warning("cannot release the lost nodes, so Slurm may end the job: %s", error)
        launcher.hosts, launcher.spares = hosts, spares

    def _ends_at(self) -> float | None:
        """Return the end of the job's time on the monotonic clock; None if unlimited or unknown."""
        try:
            left = self._scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("%s Assuming that there is enough time.", error)
            return None
        return None if left is None else time.monotonic() + left

    def _doubt(self, ended: AttemptResult | None) -> str | None:
        """Return a note on suspicious signs in a completed run; None without any."""
        return " ".join(filter(None, [self._never_met(ended), loss_not_finite(self._run)])) or None

    def _never_met(self, ended: AttemptResult | None) -> str | None:
        world_size = self._starter.world_size
        # With agents, the ranks meet at the store of an agent.
        if world_size == 1 or ended is None or ended.ranks_met or self._spec.torchrun is not None:
            return None
        return (
            f"none of the {world_size} ranks created a process group. "
            "If they were meant to train together, each trained alone."
        )

    def _finish(self, attempt: int, state: str, cause: str | None = None, note: str | None = None) -> int:
        exit_code = {"COMPLETED": 0, "CANCELLED": 0}.get(state, RunFailed.exit_code)
        more = {"note": note} if note else {}
        self._run.log_event("finished", attempt, state=state, exit_code=exit_code, cause=cause, **more)
        log.info("run %s%s", state, "".join(f": {words}" for words in (cause, note) if words))
        return exit_code

    def leave_orphaned(self, _number: int, _frame: FrameType | None) -> None:
        """Continue the run in another job: the batch script was killed, and Slurm ends this one."""
        threading.Thread(target=self._mover.save_run, name="hpctrain-orphaned").start()

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        # SimpleQueue.put is reentrant, as a signal handler requires.
        self._events.put(SignalReceived(signal.Signals(number)))


def loss_not_finite(run: RunDir) -> str | None:
    """Return the note on a run whose last loss is not finite; None for any other."""
    for record in islice(read_last_records(run.metrics, is_metrics), _RECORDS_SEARCHED):
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            loss = float(record["loss"])
            step = record.get("step")
            return None if math.isfinite(loss) else f"The last loss is {format_number(loss)} (step {step})."
    return None
