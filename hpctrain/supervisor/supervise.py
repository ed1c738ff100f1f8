"""Start the workers, diagnose their end, and carry out the next action."""

from __future__ import annotations

import logging
import signal
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType

from hpctrain import system
from hpctrain.cluster.kill_orphans import kill_orphans
from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.records.checkpoint_health import starts_over
from hpctrain.records.submit_successor import JobChanges
from hpctrain.rundir import EventKind, RunDir
from hpctrain.supervisor.acquire_run import acquire_run
from hpctrain.supervisor.failures.diagnosis import FailureAnalyzer
from hpctrain.supervisor.job_control import JobControl, known_seconds_left
from hpctrain.supervisor.launch.job_step import Launcher, SignalReceived, StepEvent
from hpctrain.supervisor.monitors.early_stopping_monitor import EarlyStoppingMonitor
from hpctrain.supervisor.monitors.node_drain_monitor import NodeDrainMonitor
from hpctrain.supervisor.monitors.scale_up_monitor import ScaleUpMonitor
from hpctrain.supervisor.policy.decide import (
    Action,
    Allocation,
    AttemptEnd,
    Decision,
    RunSituation,
    decide,
    describe_nodes,
    describe_vain_stops,
    suspect_nodes,
)
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.policy.job_intent import JobIntent
from hpctrain.supervisor.requeuer import Requeuer, RequeueRefused
from hpctrain.supervisor.run_end import completion_note, finish_run
from hpctrain.supervisor.workers.attempt_runner import AttemptResult, AttemptRunner
from hpctrain.supervisor.workers.node_steps import (
    StagePlan,
    Stager,
    check_nodes,
    drain_local_tier,
    node_check_is_due,
    remove_copies,
)
from hpctrain.supervisor.workers.worker_group import WorkerGroup

log = logging.getLogger(__name__)

#: Actions that release the nodes.
_RELEASES_NODES = frozenset({Action.REQUEUE, Action.CANCEL, Action.FAIL})


@dataclass(frozen=True)
class FinishedAttempt:
    """An ended attempt, and the reason."""

    number: int
    end: AttemptEnd
    intent: JobIntent
    result: AttemptResult | None = None
    """None if the workers were not started, or were started by another supervisor."""
    seconds: float = 0.0

    @property
    def must_release(self) -> bool:
        """True if the ranks were asked to stop, and not to continue on other nodes of the allocation."""
        monitor = None if self.result is None else self.result.monitor
        return monitor is not None and monitor.is_stopping and not monitor.draining

    @property
    def is_clean(self) -> bool:
        """True if all ranks exited by themselves after a stop, so they left no files on the nodes."""
        if self.result is None:
            return False
        return [task.code for task in self.result.monitor.exits] == [EXIT_CONTINUE] * self.result.world_size


class Supervisor:
    def __init__(
        self,
        run: RunDir,
        spec: JobSpec,
        launcher: Launcher,
        job_control: JobControl,
        grace: Mapping[str, str] | None = None,
        job_started_at: float | None = None,
        staging: tuple[StagePlan, Launcher] | None = None,
    ) -> None:
        self._run, self._spec, self._launcher, self._job_control = run, spec, launcher, job_control
        self._events: system.SimpleQueue[StepEvent] = system.SimpleQueue()
        self._stager = None if staging is None else Stager(run, *staging, self._events)
        ranks_spec = spec if staging is None else staging[0].ranks_spec
        self._worker_group = WorkerGroup(run, ranks_spec, launcher, job_started_at)
        self._attempt_runner = AttemptRunner(
            run,
            ranks_spec,
            launcher,
            job_control,
            self._events,
            self._worker_group,
            grace or {},
            self._stager,
        )
        self._failure_analyzer = FailureAnalyzer(run, spec, job_control)
        self._requeuer = Requeuer(run, spec, job_control, self._events)

    def run(self, deaths: int = 0) -> int:
        """Start the workers as often as needed, after `deaths` killed supervisors; return the exit code."""
        for number in self._job_control.on_signal:
            system.handle_signal(number, self._on_signal)
        if (code := acquire_run(self._run, self._spec, self._job_control, deaths)) is not None:
            log.info("nothing to do; this job exits")
            return code
        # Slurm or the script itself may have requeued the job, on which no supervisor decides.
        if reason := describe_vain_stops(self._spec.policy, self._history().stops):
            return finish_run(self._run, "FAILED", reason)
        self._drop_excluded()
        if deaths and (code := self._take_over()) is not None:
            return code
        with self._worker_group:
            try:
                return self._run_attempts()
            except Exception:
                self._remove_staged(max(self._run.attempts(), default=0), self._launcher.hosts)
                raise

    def _run_attempts(self) -> int:
        last_end: EndKind | None = None
        while True:
            attempt, begun = self._run.new_attempt(), system.monotonic()
            ended = self._check_nodes(attempt, last_end) or self._train(attempt)
            ended = replace(ended, seconds=system.monotonic() - begun)
            if (code := self._carry_out(self._decide(ended), ended)) is not None:
                return code
            last_end = ended.end.kind

    def _check_nodes(self, attempt: int, last_end: EndKind | None) -> FinishedAttempt | None:
        """Check the nodes if necessary. Returns None if the workers can start on these nodes."""
        if not node_check_is_due(self._spec, last_end):
            return None
        bad_nodes = check_nodes(self._run, self._spec, self._launcher, attempt)
        if bad_nodes is None:
            end = AttemptEnd(self._failure_analyzer.stop_kind(attempt))
        elif bad_nodes:
            end = self._failure_analyzer.record_bad_nodes(attempt, bad_nodes, self._launcher.hosts)
        else:
            return None
        return FinishedAttempt(attempt, end, self._requeuer.intent())

    def _train(self, attempt: int) -> FinishedAttempt:
        run, spec, control = self._run, self._spec, self._job_control
        try:
            with (
                ScaleUpMonitor(run, spec, control, attempt, len(self._launcher.hosts)),
                NodeDrainMonitor(run, spec, control, attempt, self._launcher, self._events),
                EarlyStoppingMonitor(run, self._events),
            ):
                result = self._attempt_runner.start(attempt)
        finally:
            # The ranks of the next attempt kill orphaned processes on the other hosts.
            kill_orphans(str(self._run.path), attempt + 1)
        end = self._failure_analyzer.analyze(result, self._launcher.hosts)
        return FinishedAttempt(attempt, end, self._requeuer.intent(result.monitor.signals), result)

    def _take_over(self) -> int | None:
        """Continue after the previous supervisor was killed; its ranks may still be running."""
        attempts = self._run.attempts()
        attempt = max(attempts, default=0)
        # All attempts, because on a full disk, the newest has no folder. An srun could still start a step.
        kill_orphans(str(self._run.path))
        if self._job_control.nodes is not None:
            self._job_control.nodes.kill_steps()
        if not attempts:
            return None
        stop = self._failure_analyzer.recorded_stop(attempt)
        end = self._failure_analyzer.record_supervisor_death(attempt)
        # If the supervisor was killed after the ranks had exited, complete its record.
        end = end if stop is None else AttemptEnd(stop)
        ended = FinishedAttempt(attempt, end, self._requeuer.intent())
        return self._carry_out(self._decide(ended), ended)

    def _decide(self, ended: FinishedAttempt) -> Decision:
        decision = decide(self._situation(ended), ended.end, system.monotonic())
        log.info("attempt %d ended (%s): %s", ended.number, ended.end.kind, decision)
        return decision

    def _situation(self, ended: FinishedAttempt) -> RunSituation:
        """Return the state of the run; query the controller only if required for the decision."""
        history, policy, control = self._history(), self._spec.policy, self._job_control.nodes
        situation = RunSituation(
            policy if control is not None else policy.without_exclusions(),
            history,
            ended.intent,
            lead_s=self._spec.stop_before_limit_s,
            seconds=ended.seconds,
            must_release=ended.must_release,
        )
        if ended.intent in (JobIntent.CANCEL, JobIntent.YIELD) or ended.end.kind is EndKind.DONE:
            return situation
        hosts, spares = tuple(self._launcher.hosts), tuple(self._launcher.spares)
        nodes = Allocation(hosts, spares, ended.end.lost, self._spec.min_nodes)
        memory = None
        if control is not None:
            if suspects := suspect_nodes(policy, history):
                can_reallocate = control.can_reallocate(history.excluded.union(suspects))
                nodes = replace(nodes, can_reallocate=can_reallocate)
            if ended.end.kind is EndKind.OOM:
                memory = control.larger_memory(hosts, history.excluded)
        left_s = None if ended.end.kind.releases_nodes else known_seconds_left(self._job_control)
        ends_at = None if left_s is None else system.monotonic() + left_s
        known = self._has_checkpoint()
        return replace(situation, nodes=nodes, ends_at=ends_at, larger_memory=memory, has_checkpoint=known)

    def _has_checkpoint(self) -> bool:
        with suppress(OSError):  # such as a vanished folder, which is reported elsewhere
            return not starts_over(self._run, self._spec.checkpoints)
        return True

    def _history(self) -> History:
        return History.from_events(self._run.read_events())

    def _carry_out(self, decision: Decision, ended: FinishedAttempt) -> int | None:
        """Carry out a decision. Returns the exit code of this job; None if the run continues in it."""
        end, lost = ended.end, ended.end.lost
        if decision.exclude:
            hosts, reason = list(decision.exclude), describe_nodes(decision.exclude)
            self._run.log_event("excluded", ended.number, hosts=hosts, reason=reason)
        if decision.action in _RELEASES_NODES:
            if not end.kind.is_stop:
                drain_local_tier(self._run, self._spec, self._launcher, ended.number, lost)
            elif not ended.is_clean:
                remove_copies(self._run, self._launcher, ended.number, lost)
        if decision.action not in (Action.RESTART, Action.SHRINK, Action.REPLACE):
            # Only a scheduler limits the time after a stop.
            is_short = end.kind.is_stop and self._job_control.nodes is not None
            self._remove_staged(ended.number, self._launcher.hosts, lost, is_short=is_short)
        match decision.action:
            case Action.RESTART:
                risk = {"note": decision.reason} if decision.reason else {}
                self._run.log_event("restart", ended.number, cause=end.cause, **risk)
                return None
            case Action.SHRINK | Action.REPLACE:
                # The other nodes may not respond.
                unused = [host for host in self._launcher.hosts if host not in decision.hosts]
                if not end.kind.is_stop and any(host not in lost for host in unused):
                    drain_local_tier(self._run, self._spec, self._launcher, ended.number, lost)
                self._remove_staged(ended.number, unused, lost, is_short=True)
                self._change_nodes(ended.number, decision, lost)
                return None
            case Action.REQUEUE:
                return self._requeue(ended, decision.memory)
            case Action.LEAVE:
                return EXIT_CONTINUE
            case Action.COMPLETE:
                note = end.cause or completion_note(self._run)
                return finish_run(self._run, "COMPLETED", note=note)
            case Action.CANCEL:
                return finish_run(self._run, "CANCELLED")
            case Action.FAIL:
                note = decision.reason if end.cause else None
                return finish_run(self._run, "FAILED", end.cause or decision.reason, note)

    def _drop_excluded(self) -> None:
        """Use only nodes that are not excluded, if the allocation has enough of them."""
        excluded, all_spares = self._history().excluded, self._launcher.spares
        hosts = list(Allocation(tuple(self._launcher.hosts), tuple(all_spares)).usable(excluded))
        if len(hosts) >= self._spec.min_nodes:
            spares = [host for host in all_spares if host not in hosts and host not in excluded]
            self._launcher.hosts, self._launcher.spares = hosts, spares

    def _change_nodes(self, attempt: int, decision: Decision, lost: Mapping[str, str]) -> None:
        before, hosts = self._launcher.hosts, list(decision.hosts)
        released = {**lost, **decision.exclude}
        kind: EventKind = "shrink" if decision.action is Action.SHRINK else "replace"
        fields = {"nodes": len(hosts), "nodes_before": len(before), "hosts": hosts}
        fields |= {"lost": [host for host in before if host not in hosts], "cause": describe_nodes(released)}
        self._run.log_event(kind, attempt, **fields)
        spares = [host for host in self._launcher.spares if host not in hosts and host not in released]
        if lost and self._job_control.nodes is not None:
            try:
                self._job_control.nodes.shrink_to([*hosts, *spares])
            except SchedulerError as error:
                log.warning("cannot release the lost nodes, so Slurm may end the job: %s", error)
        self._launcher.hosts, self._launcher.spares = hosts, spares

    def _remove_staged(
        self, attempt: int, hosts: list[str], lost: Container[str] = (), *, is_short: bool = False
    ) -> None:
        if self._stager is not None:
            self._stager.remove(attempt, hosts, lost, is_short=is_short)

    def _requeue(self, ended: FinishedAttempt, memory: str | None) -> int | None:
        history, nodes = self._history(), self._job_control.nodes
        excluded = history.excluded
        if excluded and nodes is not None and not nodes.can_reallocate(excluded):
            names = ", ".join(sorted(excluded))
            log.warning("not excluding %s, without which the job could not start", names)
            excluded = frozenset()
        changes = JobChanges(excluded, memory or history.memory)
        moved = self._requeuer.relocate(ended.number, ended.intent, ended.end.kind, ended.seconds, changes)
        if not isinstance(moved, RequeueRefused):
            return moved
        if cause := ended.end.cause:
            return finish_run(self._run, "FAILED", cause, moved.cause)
        return finish_run(self._run, "FAILED", f"the ranks have stopped, but {moved.cause}")

    def on_watchdog_death(self, _number: int, _frame: FrameType | None) -> None:
        """Continue the run in another job: the batch script was killed, and Slurm is ending this job."""
        system.Thread(target=self._requeuer.requeue_orphaned, name="hpctrain-orphaned").start()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # SimpleQueue.put is reentrant, as a signal handler requires.
        self._events.put(SignalReceived(signal.Signals(number)))
