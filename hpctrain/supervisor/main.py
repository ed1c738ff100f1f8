"""The supervisor: starts the workers, learns how they ended, decides what follows, until the run is over."""

from __future__ import annotations

import logging
import queue
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType

from hpctrain.cluster.connections import allow_connections
from hpctrain.errors import EXIT_CONTINUE, HpctrainError, RunFailed, SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.last_words import size_of
from hpctrain.rundir import (
    ARRAY_TASK_VARIABLE,
    ATTEMPT_VARIABLE,
    CODE_SOURCE_VARIABLE,
    CODE_VARIABLE,
    RUN_DIR_VARIABLE,
    RunDir,
)
from hpctrain.supervisor.attempt import Watch
from hpctrain.supervisor.command import command_of
from hpctrain.supervisor.decide import (
    Action,
    Fate,
    History,
    Nodes,
    Outcome,
    Way,
    Will,
    decide,
    ways_on,
    will_of,
)
from hpctrain.supervisor.failures import Failure, collect, root_cause
from hpctrain.supervisor.grace import grace_variables
from hpctrain.supervisor.local import LocalLauncher
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.supervisor.rendezvous import Rendezvous
from hpctrain.supervisor.scheduler import LocalJob, Scheduler, SlurmJob
from hpctrain.supervisor.script_checkpoints import ScriptCheckpoints
from hpctrain.supervisor.srun import SrunLauncher
from hpctrain.supervisor.step import Ending, Event, Launcher, Signalled
from hpctrain.supervisor.submission import StillGoing, own_run, take_turn

log = logging.getLogger(__name__)

#: After a requeue Slurm ends this process, which waits for that, lest the batch script end by itself.
_REQUEUE_LIMIT_S = 60.0

#: To the store: one for its process group, and one where it reports a failure.
_CONNECTIONS_PER_RANK = 2


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
        self._grace = grace or {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ranks_met = False
        self._lost: dict[str, str] = {}

    @property
    def _world_size(self) -> int:
        """The number of ranks on the nodes that the job has now."""
        return len(self._launcher.hosts) * self._spec.tasks_per_node

    def run(self) -> int:
        """Start the workers as often as it takes. Returns the exit code of the job."""
        for number in self._scheduler.on_signal:
            signal.signal(number, self._note_signal)
        if (exit_code := take_turn(self._run, self._spec, self._scheduler)) is not None:
            log.info("the run is complete; nothing is left to do")
            return exit_code
        while True:
            attempt, begun = self._run.new_attempt(), time.monotonic()
            outcome, will, cause = self._attempt(attempt)
            history = History.of(self._run.read_events())
            # Only a crash makes the time left matter, and asking for it is a call to the controller.
            time_is_short = outcome is Outcome.FAILED and self._time_is_short()
            hosts = self._launcher.hosts
            left = [host for host in hosts if host not in self._lost]
            nodes = Nodes(left=len(left), least=self._spec.min_nodes, lost=len(self._lost))
            action = decide(
                history, outcome, will, self._spec.max_failures, time_is_short=time_is_short, nodes=nodes
            )
            log.info("attempt %d: %s, %s: %s", attempt, outcome.value, will.value, action.value)
            match action:
                case Action.RESTART:
                    self._run.log_event("restart", attempt, cause=cause)
                case Action.SHRINK:
                    self._shrink(attempt, left)
                case Action.REQUEUE:
                    if (exit_code := self._move(attempt, will, time.monotonic() - begun)) is not None:
                        return exit_code
                case Action.LEAVE:
                    return EXIT_CONTINUE
                case Action.COMPLETE:
                    return self._finish(attempt, "COMPLETED", note=self._doubt())
                case Action.CANCEL:
                    return self._finish(attempt, "CANCELLED")
                case Action.FAIL:
                    return self._finish(attempt, "FAILED", cause or _why(outcome, history))

    def _shrink(self, attempt: int, left: list[str]) -> None:
        """Go on with the nodes that are left, and have Slurm take back the others."""
        launcher = self._launcher
        cause = _words(self._lost)
        self._run.log_event(
            "shrink",
            attempt,
            nodes=len(left),
            nodes_before=len(launcher.hosts),
            hosts=left,
            lost=list(self._lost),
            cause=cause,
        )
        try:
            self._scheduler.keep(left)
        except SchedulerError as error:
            log.warning("The lost nodes stay with the job, which Slurm may end with them: %s", error)
        launcher.hosts = left

    def _move(self, attempt: int, will: Will, seconds: float) -> int | None:
        """Give the allocation back and ask for another. Returns the job's exit code; None: go on here."""
        ways = ways_on(self._spec.continue_by, will, requeues=self._requeues())
        self._run.log_event("requeue", attempt, seconds=seconds, by=ways[0].value)
        refusals = []
        for way in ways:
            try:
                if way is Way.SUCCESSOR:
                    log.info("job %s continues the run", self._scheduler.hand_on(attempt))
                    return EXIT_CONTINUE
                return self._wait_for_the_end() if self._scheduler.requeue() else None
            except SchedulerError as error:
                if self._will(signals=()) is Will.LEAVE:
                    return EXIT_CONTINUE  # Slurm was faster, and has taken over.
                log.warning("no %s: %s", way.value, error)
                refusals.append(f"the {way.value} failed: {error}")
        return self._finish(attempt, "FAILED", f"the state is saved, but {'; '.join(refusals)}")

    def _requeues(self) -> bool:
        try:
            return self._scheduler.requeues()
        except SchedulerError as error:
            log.warning("%s Taking the site for one that requeues.", error)
            return True

    def _attempt(self, attempt: int) -> tuple[Outcome, Will, str | None]:
        """Start the workers and watch them to their end. Returns outcome, will, and a failure's cause."""
        spec = self._spec
        watch = Watch(
            events=self._events,
            scheduler=self._scheduler,
            ends_at=self._scheduler.ends_job_at,
            signal_lead_s=spec.signal_lead_s,
            process="rank" if spec.torchrun is None else "agent",
        )
        scripts_own = ScriptCheckpoints(self._run.checkpoints)
        with Rendezvous(self._launcher.address) as rendezvous:
            variables = {
                **rendezvous.variables,
                RUN_DIR_VARIABLE: str(self._run.path),
                ATTEMPT_VARIABLE: str(attempt),
                **self._grace,
            }
            if spec.code is not None:
                variables |= {CODE_VARIABLE: spec.code.copy, CODE_SOURCE_VARIABLE: spec.code.source}
            if spec.array_task is not None:
                variables[ARRAY_TASK_VARIABLE] = str(spec.array_task)
            hosts = self._launcher.hosts
            self._run.log_event(
                "started", attempt, nodes=len(hosts), world_size=self._world_size, hosts=hosts
            )
            said = size_of(self._run.slurm_log)
            log.info("attempt %d: starting %d ranks on %s", attempt, self._world_size, hosts)
            step = self._launcher.start(command_of(spec, len(hosts)), variables, self._events.put)
            try:
                rendezvous.serve()
                outcome = watch.until_end(step)
                self._ranks_met = rendezvous.was_used()
            finally:
                step.close()
        if (path := scripts_own.newest_since()) is not None:
            self._run.log_event("checkpoint", attempt, step=None, path=str(path))
        cause = None
        self._lost = self._find_lost() if outcome in (Outcome.NOT_STARTED, Outcome.FAILED) else {}
        if outcome is Outcome.NOT_STARTED:
            cause = self._note_refusal(attempt, watch)
        elif outcome is Outcome.FAILED:
            outcome, cause = self._note_failure(attempt, watch, said)
        return outcome, self._will(watch.signals), cause

    def _note_failure(self, attempt: int, watch: Watch, said: int) -> tuple[Outcome, str | None]:
        """Record what went wrong. Returns what it comes to, and the cause.

        Ranks that only lost peers which had been told to leave have not failed: they were stopped.
        """
        failures = collect(self._run, self._spec, attempt, watch.exits, self._launcher.hosts, said)
        told_to_leave = any(task.ending is Ending.CONTINUE for task in watch.exits)
        if self._lost:
            # Whatever the ranks say, they say it because of that.
            return Outcome.FAILED, self._record_loss(attempt, len(failures))
        if not failures:
            return Outcome.FAILED, "the step ended badly, and no rank said why"
        first = root_cause(failures)
        if told_to_leave and first.is_peer_lost:
            return Outcome.STOPPED, None
        # A rank that was left alone by peers that were told to stop may fail in its own words.
        doomed = first.final and not first.is_peer_lost and not told_to_leave
        outcome = Outcome.DOOMED if doomed else Outcome.FAILED
        return outcome, self._record(attempt, first, len(failures))

    def _find_lost(self) -> dict[str, str]:
        """Nodes that were lost, and why; none where nobody can tell."""
        if len(self._launcher.hosts) == 1:
            return {}
        try:
            return self._scheduler.lost_nodes(self._launcher.hosts)
        except SchedulerError as error:
            log.warning("Whether a node was lost cannot be told: %s", error)
            return {}

    def _record_loss(self, attempt: int, count: int) -> str:
        """Record that nodes were lost: it is the first rank of the first of them that failed."""
        host = next(iter(self._lost))
        rank = self._launcher.hosts.index(host) * self._spec.tasks_per_node
        cause = f"node lost: {_words(self._lost)}"
        log_path = self._run.rank_log(attempt, rank)
        self._run.log_event(
            "failure", attempt, rank=rank, host=host, cause=cause, log=str(log_path), failed_ranks=count
        )
        log.error("attempt %d failed: %s", attempt, cause)
        return cause

    def _note_refusal(self, attempt: int, watch: Watch) -> str:
        assert watch.end is not None
        cause = f"the step did not start: srun exited with {watch.end.returncode}: {watch.end.words}"
        self._run.log_event("failure", attempt, rank=-1, host=None, cause=cause, log=str(self._run.slurm_log))
        log.error("attempt %d: %s", attempt, cause)
        return cause

    def _record(self, attempt: int, first: Failure, count: int) -> str:
        cause = str(first)
        self._run.log_event(
            "failure",
            attempt,
            rank=first.rank,
            host=first.host,
            cause=cause,
            log=first.log,
            failed_ranks=count,
        )
        log.error("attempt %d failed: %s (log: %s)", attempt, cause, first.log)
        return cause

    def _will(self, signals: Iterable[signal.Signals]) -> Will:
        cancelled = self._run.cancel_request.exists() or bool(self._scheduler.cancels.intersection(signals))
        fate = Fate.STAYS
        if not cancelled:
            try:
                fate = self._scheduler.fate()
            except SchedulerError as error:
                log.warning("%s Taking the job for one that goes on.", error)
        return will_of(cancelled=cancelled, fate=fate, continue_by=self._spec.continue_by)

    def _time_is_short(self) -> bool:
        """Whether ranks that start now would be told to stop at once, or were told while none was there."""
        try:
            left = self._scheduler.seconds_left()
        except SchedulerError as error:
            log.warning("%s Taking the time to be enough.", error)
            return False
        return left is not None and left <= self._spec.signal_lead_s

    def _doubt(self) -> str | None:
        """What is odd about a run that has completed."""
        # Where agents start the ranks, these meet at a store of an agent's.
        if self._world_size == 1 or self._ranks_met or self._spec.torchrun is not None:
            return None
        return (
            f"none of the {self._world_size} ranks made a process group. "
            "If they were to train together, each has trained on its own."
        )

    def _finish(self, attempt: int, state: str, cause: str | None = None, note: str | None = None) -> int:
        exit_code = {"COMPLETED": 0, "CANCELLED": 0}.get(state, RunFailed.exit_code)
        more = {"note": note} if note else {}
        self._run.log_event("finished", attempt, state=state, exit_code=exit_code, cause=cause, **more)
        log.info("run %s%s", state, "".join(f": {words}" for words in (cause, note) if words))
        return exit_code

    def _wait_for_the_end(self) -> int:
        """Wait for Slurm to end this process, which it does to requeue the job."""
        log.info("requeued; waiting for Slurm to end this job")
        try:
            self._events.get(timeout=_REQUEUE_LIMIT_S)
        except queue.Empty:
            log.warning("Slurm has not ended this job within %.0f s of its requeue", _REQUEUE_LIMIT_S)
        return EXIT_CONTINUE

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        # SimpleQueue.put may be interrupted by itself, which is what a signal handler needs.
        self._events.put(Signalled(signal.Signals(number)))


def _words(lost: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {why}" for host, why in lost.items())


def _why(outcome: Outcome, history: History) -> str:
    if outcome is Outcome.STOPPED:
        return f"{history.stops} stops in a row, each soon after the start and without a new checkpoint"
    return "the ranks did not save and leave before the time limit; submit with a longer --signal-lead"


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    """Supervise the run in the folder `argv[0]`; of a job array, the task that this job is."""
    run = own_run(RunDir(Path(argv[0])), environ)
    run.logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        filename=run.supervisor_log,
    )
    try:
        spec = JobSpec.load(run.spec)
        if spec.array is not None:
            return LocalArray(run, spec, environ).run()
        allow_connections(_CONNECTIONS_PER_RANK * spec.world_size)
        if spec.backend == "slurm":
            launcher, scheduler = SrunLauncher(spec, environ), SlurmJob(run, spec, environ)
            return Supervisor(run, spec, launcher, scheduler, grace_variables(spec, environ)).run()
        grace = grace_variables(spec, environ)
        return Supervisor(run, spec, LocalLauncher(spec, environ), LocalJob(spec), grace).run()
    except StillGoing as error:
        # What becomes of the run is for that job to write down.
        log.error("%s", error)
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except HpctrainError as error:
        log.error("%s", error)
        run.log_event(
            "finished", max(run.attempts(), default=0), state="FAILED", exit_code=4, cause=str(error)
        )
        return RunFailed.exit_code
    except Exception as error:
        log.exception("the supervisor itself failed")
        cause = f"the supervisor failed: {type(error).__name__}: {error} (see {run.supervisor_log})"
        run.log_event("finished", max(run.attempts(), default=0), state="FAILED", exit_code=4, cause=cause)
        return RunFailed.exit_code
