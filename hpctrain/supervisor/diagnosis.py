"""What an attempt that failed comes to: its cause, out of exits, failure files and nodes, and its record."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.errors import SchedulerError
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.decide import Outcome
from hpctrain.supervisor.failures import Failure, collect, root_cause
from hpctrain.supervisor.scheduler import Scheduler
from hpctrain.supervisor.start import Ended
from hpctrain.supervisor.step import Ending

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Diagnosis:
    """What an attempt comes to."""

    outcome: Outcome
    cause: str | None = None
    """Why it failed; None where it did not."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Nodes that were lost, and why."""


@dataclass(frozen=True)
class Diagnostician:
    """Finds out what attempts come to, and writes it into the run's record."""

    run: RunDir
    spec: JobSpec
    scheduler: Scheduler

    def look(self, ended: Ended, hosts: list[str]) -> Diagnosis:
        """Find out what an attempt on `hosts` comes to."""
        if ended.outcome is Outcome.NOT_STARTED:
            return Diagnosis(ended.outcome, self._refused(ended), self._find_lost(hosts))
        if ended.outcome is Outcome.FAILED:
            return self._failed(ended, hosts)
        return Diagnosis(ended.outcome)

    def _failed(self, ended: Ended, hosts: list[str]) -> Diagnosis:
        """Ranks that only lost peers which had been told to leave have not failed: they were stopped."""
        lost = self._find_lost(hosts)
        failures = collect(self.run, self.spec, ended.attempt, ended.watch.exits, hosts, ended.said)
        told_to_leave = any(task.ending is Ending.CONTINUE for task in ended.watch.exits)
        if lost:
            # Whatever the ranks say, they say it because of that.
            return Diagnosis(
                Outcome.FAILED, self._record_loss(ended.attempt, lost, hosts, len(failures)), lost
            )
        if not failures:
            return Diagnosis(Outcome.FAILED, "the step ended badly, and no rank said why")
        first = root_cause(failures)
        if told_to_leave and first.is_peer_lost:
            return Diagnosis(Outcome.STOPPED)
        # A rank that was left alone by peers that were told to stop may fail in its own words.
        doomed = first.final and not first.is_peer_lost and not told_to_leave
        outcome = Outcome.DOOMED if doomed else Outcome.FAILED
        return Diagnosis(outcome, self._record(ended.attempt, first, len(failures)))

    def _find_lost(self, hosts: list[str]) -> dict[str, str]:
        """Nodes that were lost, and why; none where nobody can tell."""
        if len(hosts) == 1:
            return {}
        try:
            return self.scheduler.lost_nodes(hosts)
        except SchedulerError as error:
            log.warning("Whether a node was lost cannot be told: %s", error)
            return {}

    def _record_loss(self, attempt: int, lost: Mapping[str, str], hosts: list[str], count: int) -> str:
        """Record that nodes were lost: it is the first rank of the first of them that failed."""
        host = next(iter(lost))
        rank = hosts.index(host) * self.spec.tasks_per_node
        cause = f"node lost: {in_words(lost)}"
        log_path = self.run.rank_log(attempt, rank)
        self.run.log_event(
            "failure", attempt, rank=rank, host=host, cause=cause, log=str(log_path), failed_ranks=count
        )
        log.error("attempt %d failed: %s", attempt, cause)
        return cause

    def _refused(self, ended: Ended) -> str:
        end = ended.watch.end
        assert end is not None
        cause = f"the step did not start: srun exited with {end.returncode}: {end.words}"
        log_path = str(self.run.slurm_log)
        self.run.log_event("failure", ended.attempt, rank=-1, host=None, cause=cause, log=log_path)
        log.error("attempt %d: %s", ended.attempt, cause)
        return cause

    def _record(self, attempt: int, first: Failure, count: int) -> str:
        cause = str(first)
        self.run.log_event(
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


def in_words(reasons: Mapping[str, str]) -> str:
    """Nodes and what is wrong with them, as one text."""
    return "; ".join(f"{host}: {why}" for host, why in reasons.items())
