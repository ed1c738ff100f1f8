"""What an attempt came to: its kind and cause, out of exits, failure files and nodes, and their record."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.errors import SchedulerError
from hpctrain.jobs.restart import Kind
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir
from hpctrain.supervisor.classify import classify, comes_again
from hpctrain.supervisor.decide import End
from hpctrain.supervisor.failures import Failure, collect, root_cause
from hpctrain.supervisor.gpu_faults import gpu_faults
from hpctrain.supervisor.history import SHORT_ATTEMPT_S
from hpctrain.supervisor.outcome import Outcome
from hpctrain.supervisor.scheduler import SIGNAL_EARLY_S, Scheduler
from hpctrain.supervisor.start import Ended
from hpctrain.supervisor.step import Ending

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Diagnosis:
    """What an attempt came to."""

    end: End
    lost: Mapping[str, str] = field(default_factory=dict)
    """Nodes that were lost, and why."""


@dataclass(frozen=True)
class Diagnostician:
    """Finds out what attempts came to, and writes it into the run's record."""

    run: RunDir
    spec: JobSpec
    scheduler: Scheduler

    def look(self, ended: Ended, hosts: list[str]) -> Diagnosis:
        """Find out what an attempt on `hosts` came to."""
        match ended.outcome:
            case Outcome.DONE:
                return Diagnosis(End(Kind.DONE))
            case Outcome.STOPPED:
                return Diagnosis(End(self.kind_of_stop(ended.attempt)))
            case Outcome.OUT_OF_TIME:
                return Diagnosis(End(Kind.OUT_OF_TIME))
            case Outcome.NOT_STARTED:
                return Diagnosis(self._refused(ended), self._find_lost(hosts))
            case Outcome.FAILED:
                return self._failed(ended, hosts)

    def supervisor_killed(self, attempt: int) -> End:
        """Record that the supervisor itself was killed, and the ranks with it."""
        cause, log_path = "the supervisor was killed", str(self.run.supervisor_log)
        return self._record(attempt, Kind.KILLED, cause, rank=-1, host=None, log=log_path)

    def stop_on_record(self, attempt: int) -> Kind | None:
        """Why the allocation was to be given back after the attempt's ranks had left; None if it was not."""
        for event in last_records(self.run.events):
            if event.get("attempt") != attempt or event.get("kind") == "started":
                break
            if event.get("kind") == "requeue" and event.get("class") in set(Kind):
                kind = Kind(event["class"])
                return kind if kind.is_stop else None
        return None

    def nodes_at_fault(self, attempt: int, bad: Mapping[str, str], hosts: list[str]) -> End:
        """Record that nodes failed the check before a start."""
        end = End(Kind.NODE_CHECK)
        for host, why in bad.items():
            rank = hosts.index(host) * self.spec.tasks_per_node
            cause, log_path = f"node check: {host}: {why}", str(self.run.check(attempt, rank))
            end = self._record(attempt, Kind.NODE_CHECK, cause, rank=rank, host=host, log=log_path)
        return End(end.kind, f"node check: {in_words(bad)}")

    def kind_of_stop(self, attempt: int) -> Kind:
        """Who told the ranks to leave. Ranks without the `Trainer` do not say which signal they got."""
        if self.run.is_asked_to_requeue(attempt):
            return Kind.REQUESTED
        for event in last_records(self.run.events):
            if event.get("kind") == "signal" and event.get("attempt") == attempt:
                return Kind.TIME_LIMIT if event.get("signal") == signal.SIGUSR2.name else Kind.PREEMPTED
            if event.get("kind") == "started":
                break
        try:
            left = self.scheduler.seconds_left()
        except SchedulerError:
            left = None
        near = left is not None and left <= self.spec.signal_lead_s + SIGNAL_EARLY_S
        return Kind.TIME_LIMIT if near else Kind.PREEMPTED

    def _failed(self, ended: Ended, hosts: list[str]) -> Diagnosis:
        """Ranks that only lost peers which had been told to leave have not failed: they were stopped."""
        attempt, exits = ended.attempt, ended.watch.exits
        lost = self._find_lost(hosts)
        if (hung := ended.watch.hung) is not None and not lost:
            log_path = str(self.run.rank_log(attempt, hung.rank))
            end = self._record(attempt, Kind.HANG, hung.cause, rank=hung.rank, host=hung.host, log=log_path)
            return Diagnosis(end)
        failures = collect(self.run, self.spec, attempt, exits, hosts, ended.said)
        if lost:
            # Whatever the ranks say, they say it because of that.
            return Diagnosis(self._record_loss(attempt, lost, hosts, len(failures)), lost)
        if not failures:
            cause = "the step ended badly, and no rank said why"
            return Diagnosis(self._record(attempt, Kind.KILLED, cause, rank=-1, host=None, log=None))
        first = root_cause(failures)
        told_to_leave = any(task.ending is Ending.CONTINUE for task in exits)
        if told_to_leave and first.is_peer_lost:
            return Diagnosis(End(self.kind_of_stop(ended.attempt)))
        kind = Kind.GPU if gpu_faults(self.run, first.host, ended.begun) else classify(first)
        # A rank that was left alone by peers that were told to stop may fail in its own words.
        if kind is Kind.PYTHON and not told_to_leave and self._is_users_error(ended, first):
            kind = Kind.USER_ERROR
        return Diagnosis(
            self._record(
                attempt,
                kind,
                str(first),
                rank=first.rank,
                host=first.host,
                log=first.log,
                failed_ranks=len(failures),
            )
        )

    def _is_users_error(self, ended: Ended, first: Failure) -> bool:
        """Whether the next start would end the same way, and there is nothing that it could go on from.

        A function says so itself. A script does where it raises soon after its start, in its first step.
        """
        if first.final or self.run.function.exists():
            return first.final
        if not comes_again(first) or time.time() - ended.begun > SHORT_ATTEMPT_S:
            return False
        saved = any(event["kind"] in ("checkpoint", "resumed") for event in self.run.read_events())
        newest = next(last_records(self.run.metrics), {})
        return not saved and int(newest.get("step", 0)) <= 1

    def _find_lost(self, hosts: list[str]) -> dict[str, str]:
        """Nodes that were lost, and why; none where nobody can tell."""
        if len(hosts) == 1:
            return {}
        try:
            return self.scheduler.lost_nodes(hosts)
        except SchedulerError as error:
            log.warning("Whether a node was lost cannot be told: %s", error)
            return {}

    def _record_loss(self, attempt: int, lost: Mapping[str, str], hosts: list[str], count: int) -> End:
        """Record that nodes were lost: it is the first rank of the first of them that failed."""
        host = next(iter(lost))
        rank = hosts.index(host) * self.spec.tasks_per_node
        cause = f"node lost: {in_words(lost)}"
        log_path = str(self.run.rank_log(attempt, rank))
        return self._record(
            attempt, Kind.NODE_LOST, cause, rank=rank, host=host, log=log_path, failed_ranks=count
        )

    def _refused(self, ended: Ended) -> End:
        end = ended.watch.end
        assert end is not None
        cause = f"the step did not start: srun exited with {end.returncode}: {end.words}"
        return self._record(
            ended.attempt, Kind.NOT_STARTED, cause, rank=-1, host=None, log=str(self.run.slurm_log)
        )

    def _record(
        self,
        attempt: int,
        kind: Kind,
        cause: str,
        *,
        rank: int,
        host: str | None,
        log: str | None,
        **more: int,
    ) -> End:
        self.run.log_event(
            "failure", attempt, rank=rank, host=host, cause=cause, log=log, **more, **{"class": kind}
        )
        _say(attempt, kind, cause, log)
        return End(kind, cause)


def _say(attempt: int, kind: Kind, cause: str, path: str | None) -> None:
    log.error("attempt %d failed (%s): %s (log: %s)", attempt, kind, cause, path)


def in_words(reasons: Mapping[str, str]) -> str:
    """Nodes and what is wrong with them, as one text."""
    return "; ".join(f"{host}: {why}" for host, why in reasons.items())
