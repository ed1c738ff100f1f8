"""Disturbing a run on purpose: faults at random moments, to see that it ends as an undisturbed one would."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hpctrain.cluster.strike import strike_ranks
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs import steer
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.record import read_record
from hpctrain.jobs.runs import Run
from hpctrain.jobs.slurm_command import CHAOS_STEP, run_slurm
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus

#: Ranks that are started again are there within this.
_REACH_LIMIT_S = 120.0


class Fault(StrEnum):
    """What can be done to a run."""

    KILL_RANK = "kill-rank"
    """A rank gets SIGKILL."""
    KILL_NODE_RANKS = "kill-node-ranks"
    """All ranks of a node get SIGKILL."""
    STOP_RANK = "stop-rank"
    """A rank gets SIGSTOP, and the others wait for it until that counts as a hang."""
    KILL_SUPERVISOR = "kill-supervisor"
    """The supervisor gets SIGKILL."""
    PREEMPT = "preempt"
    """The ranks get the signal of a preemption."""
    REQUEUE = "requeue"
    """Slurm puts the job back into the queue, as `scontrol requeue` does."""


#: Without Slurm nobody starts a supervisor again, and there is no queue.
_SLURM_ONLY = frozenset({Fault.KILL_SUPERVISOR, Fault.REQUEUE})


@dataclass(frozen=True)
class Blow:
    """What is done to a run at one moment."""

    fault: Fault
    attempt: int
    ranks: tuple[int, ...] = ()
    """Whom it meets."""
    host: str | None = None
    """Where these are."""

    def __str__(self) -> str:
        if not self.ranks:
            return str(self.fault)
        first, last = self.ranks[0], self.ranks[-1]
        whom = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"{self.fault}: {whom} on {self.host}"


def faults_for(backend: str | None, asked: Collection[Fault]) -> tuple[Fault, ...]:
    """The faults to choose from: those that were asked for, or all that need no patience.

    Raises:
        SpecError: one that was asked for cannot be had there.
    """
    possible = [fault for fault in Fault if backend == "slurm" or fault not in _SLURM_ONLY]
    if impossible := sorted(set(asked).difference(possible)):
        raise SpecError(
            f"--fault {', '.join(impossible)} needs Slurm, but this run's backend is {backend}: nobody would "
            f"start the run again. There are {', '.join(possible)}."
        )
    return tuple(sorted(asked)) or tuple(fault for fault in possible if fault is not Fault.STOP_RANK)


def choose(faults: Sequence[Fault], started: Mapping[str, Any], chance: random.Random) -> Blow:
    """The next blow, by chance.

    Args:
        faults: those to choose from.
        started: the event of the newest start of the ranks.
        chance: the only source of what is chosen.
    """
    fault, attempt = chance.choice(faults), int(started["attempt"])
    world_size, hosts = int(started["world_size"]), [str(host) for host in started["hosts"]]
    rank, per_node = chance.randrange(world_size), world_size // len(hosts)
    node = rank // per_node
    match fault:
        case Fault.KILL_RANK | Fault.STOP_RANK:
            return Blow(fault, attempt, (rank,), hosts[node])
        case Fault.KILL_NODE_RANKS:
            return Blow(fault, attempt, tuple(range(node * per_node, (node + 1) * per_node)), hosts[node])
        case _:
            return Blow(fault, attempt)


@dataclass(frozen=True)
class Chaos:
    """Disturbs one run.

    Attributes:
        run: the run.
        faults: what may happen to it.
        seed: of the random numbers; a blow's are its own, whenever it comes.
        tell: gets a sentence about each blow.
    """

    run: Run
    faults: tuple[Fault, ...]
    seed: int
    tell: Callable[[str], object]

    def go_on(self, times: int, every_s: float, *, dry_run: bool = False) -> int:
        """Disturb the run until it has ended or was struck so often; returns how often that was.

        Args:
            times: how often at the most.
            every_s: seconds between two blows on the average, of which half at the least.
            dry_run: only tell.

        Raises:
            SchedulerError: there is nothing that could be struck for too long, though the run goes on.
        """
        done, due = 0, time.monotonic()
        missed: float | None = None
        for status in self.run.watch():
            now = time.monotonic()
            if status.state is RunState.PENDING:
                missed = None
            if status.state is RunState.PENDING or now < due:
                continue
            chance = random.Random(f"{self.seed}/{done}")
            blow = self._next(status, chance)
            if blow is not None and (dry_run or self._strike(blow, status)):
                self.tell(f"would do {blow}" if dry_run else str(blow))
                done, missed = done + 1, None
                if done == times:
                    break
                due = now if dry_run else now + every_s * chance.uniform(0.5, 1.5)
            elif missed is None:
                missed = now
            elif now - missed > _REACH_LIMIT_S:
                raise SchedulerError(
                    f"Run {self.run.run_id} is {status.state}, but nothing of it could be reached for "
                    f"{_REACH_LIMIT_S:.0f} s: {blow or 'it has not started any ranks'}."
                )
        return done

    def _next(self, status: RunStatus, chance: random.Random) -> Blow | None:
        started = read_record(self.run.dir).started
        if status.state is not RunState.RUNNING or started is None or started["attempt"] != status.attempt:
            return None
        return choose(self.faults, started, chance)

    def _strike(self, blow: Blow, status: RunStatus) -> bool:
        """Whether it met somebody. Ranks come and go, so that it may meet nobody."""
        try:
            if not self._does(blow, status):
                return False
        except SchedulerError:
            return False
        self.run.dir.log_event(
            "chaos", blow.attempt, fault=blow.fault, ranks=list(blow.ranks), host=blow.host
        )
        return True

    def _does(self, blow: Blow, status: RunStatus) -> bool:
        run_dir, slurm = str(self.run.dir.path), status.backend == "slurm"
        environ = outer_environment(self.run.environ)
        match blow.fault:
            case Fault.PREEMPT:
                steer.preempt([self.run.dir], self.run.environ)
                return True
            case Fault.REQUEUE:
                run_slurm(["scontrol", "requeue", str(status.job_id)], environ)
                return True
            case Fault.KILL_SUPERVISOR:
                raw_id, host = _batch_host(str(status.job_id), environ)
                words = [run_dir, signal.SIGKILL.name, "supervisor"]
                return _on_host(raw_id, host, words, environ)
        number = signal.SIGSTOP if blow.fault is Fault.STOP_RANK else signal.SIGKILL
        if not slurm:
            return bool(strike_ranks(run_dir, number, blow.attempt, blow.ranks))
        raw_id, _ = _batch_host(str(status.job_id), environ)
        words = [run_dir, number.name, str(blow.attempt), *map(str, blow.ranks)]
        return _on_host(raw_id, str(blow.host), words, environ)


def check_run(run: Run) -> RunStatus:
    """Whether the run may be disturbed: it is the caller's, and is running.

    Raises:
        SpecError: it is not.
    """
    if (owner := run.dir.path.stat().st_uid) != os.geteuid():
        raise SpecError(
            f"Run {run.run_id} belongs to user {owner} and you are {os.geteuid()}: disturb a run of your own."
        )
    if tasks := run.dir.tasks():
        raise SpecError(
            f"Run {run.run_id} is a job array: name one of its tasks, as in {run.run_id}/task-{tasks[0]}."
        )
    status = run.status()
    if status.state is not RunState.RUNNING:
        raise SpecError(f"Run {run.run_id} is {status.state}; only a running one can be disturbed.")
    return status


def _batch_host(job_id: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The job's number, which a task of an array has besides its name, and where its script runs.

    Raises:
        SchedulerError: Slurm does not answer, or the job has no place.
    """
    words = run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A %B"], environ).split()
    if len(words) != 2:
        raise SchedulerError(f"squeue does not tell where job {job_id} runs.")
    return words[0], words[1]


def _on_host(job_id: str, host: str, words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Send a signal on a node of the job, by a step beside that of the ranks.

    Raises:
        SchedulerError: the step could not be started, or met nobody.
    """
    step = [f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mpi=none"]
    how = [f"--job-name={CHAOS_STEP}", "--gres=none", "--input=none", "--quiet"]
    run_slurm(["srun", *step, *how, sys.executable, "-P", "-m", "hpctrain.cluster.strike", *words], environ)
    return True
