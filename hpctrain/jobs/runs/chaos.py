"""Fault injection: disturb a run at random times, to check that the result is unaffected."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from hpctrain.cluster.signal_processes import signal_ranks
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.runs import run_control
from hpctrain.jobs.runs.run import Run, require_running
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.record_types import Event
from hpctrain.records.run_record import read_run_record
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.job_requests import requeue_job, run_on_host
from hpctrain.slurm.states import RunState
from hpctrain.text import format_ranks

#: Ranks restart within this time.
_REACH_LIMIT_S = 120.0


class Fault(StrEnum):
    KILL_RANK = "kill-rank"
    KILL_NODE_RANKS = "kill-node-ranks"
    #: With SIGSTOP; the other ranks wait until the hang is detected, which takes minutes.
    STOP_RANK = "stop-rank"
    KILL_SUPERVISOR = "kill-supervisor"
    #: The ranks receive the preemption signal.
    PREEMPT = "preempt"
    #: As with `scontrol requeue`.
    REQUEUE = "requeue"


#: Without Slurm, nothing restarts a supervisor, and there is no queue.
_SLURM_ONLY = frozenset({Fault.KILL_SUPERVISOR, Fault.REQUEUE})
#: The ranks of a batch script are processes of its own launchers.
_NOT_FOR_BATCH = frozenset({Fault.KILL_RANK, Fault.KILL_NODE_RANKS, Fault.STOP_RANK})


@dataclass(frozen=True)
class FaultInjection:
    fault: Fault
    attempt: int
    ranks: tuple[int, ...] = ()
    """Ranks to signal; empty if the fault does not target ranks."""
    host: str | None = None
    """Host of these ranks."""

    def __str__(self) -> str:
        if not self.ranks:
            return str(self.fault)
        return f"{self.fault}: {format_ranks(self.ranks)} on {self.host}"


def faults_for(
    backend: str | None, requested: Collection[Fault], *, is_batch: bool = False
) -> tuple[Fault, ...]:
    """Return the requested faults; by default all that are detected within seconds."""
    possible = [fault for fault in Fault if backend == "slurm" or fault not in _SLURM_ONLY]
    if is_batch:
        possible = [fault for fault in possible if fault not in _NOT_FOR_BATCH]
    if is_batch and (impossible := sorted(_NOT_FOR_BATCH.intersection(requested))):
        raise SpecError(
            f"--fault {', '.join(impossible)} signals ranks that hpctrain starts, but the batch script of "
            f"this run starts its own. Valid faults: {', '.join(possible)}."
        )
    if impossible := sorted(set(requested).difference(possible)):
        raise SpecError(
            f"--fault {', '.join(impossible)} requires Slurm, but this run uses the {backend} backend, which "
            f"would not restart the run. Valid faults: {', '.join(possible)}."
        )
    return tuple(sorted(requested)) or tuple(fault for fault in possible if fault is not Fault.STOP_RANK)


def choose_fault(faults: Sequence[Fault], started: Event, chance: random.Random) -> FaultInjection:
    fault, attempt = chance.choice(faults), started.attempt
    world_size, hosts = started.world_size or 1, started.hosts or [""]
    rank, per_node = chance.randrange(world_size), world_size // len(hosts)
    node = rank // per_node
    match fault:
        case Fault.KILL_RANK | Fault.STOP_RANK:
            return FaultInjection(fault, attempt, (rank,), hosts[node])
        case Fault.KILL_NODE_RANKS:
            ranks = range(node * per_node, (node + 1) * per_node)
            return FaultInjection(fault, attempt, tuple(ranks), hosts[node])
        case _:
            return FaultInjection(fault, attempt)


@dataclass(frozen=True)
class ChaosRunner:
    run: Run
    faults: tuple[Fault, ...]
    seed: int
    report: Callable[[str], object]

    def inject_faults(self, times: int, every_s: float, *, dry_run: bool = False) -> int:
        """Disturb the run until it has ended or `times` is reached; return the number of faults."""
        done, due = 0, time.monotonic()
        missed: float | None = None
        for status in self.run.watch():
            time_s = time.monotonic()
            if status.state is RunState.PENDING:
                missed = None
            if status.state is RunState.PENDING or time_s < due:
                continue
            chance, injection = random.Random(f"{self.seed}/{done}"), None
            started = read_run_record(self.run.dir).started
            if status.state is RunState.RUNNING and started and started.attempt == status.attempt:
                injection = choose_fault(self.faults, started, chance)
            if injection is not None and (dry_run or self._inject(injection, status)):
                self.report(f"would inject {injection}" if dry_run else str(injection))
                done, missed = done + 1, None
                if done == times:
                    break
                due = time_s if dry_run else time_s + every_s * chance.uniform(0.5, 1.5)
            elif missed is None:
                missed = time_s
            elif time_s - missed > _REACH_LIMIT_S:
                raise SchedulerError(
                    f"Run {self.run.run_id} is {status.state}, but no fault could be injected within "
                    f"{_REACH_LIMIT_S:.0f} s ({injection or 'no ranks have been started'})."
                )
        return done

    def _inject(self, injection: FaultInjection, status: RunStatus) -> bool:
        """Return true if the fault affected a process; ranks may exit at any time."""
        try:
            if not self._send_fault(injection, status):
                return False
        except SchedulerError:
            return False
        details = {"fault": injection.fault, "ranks": list(injection.ranks), "host": injection.host}
        self.run.dir.log_event("chaos", injection.attempt, **details)
        return True

    def _send_fault(self, injection: FaultInjection, status: RunStatus) -> bool:
        run_dir, job_id, fault = str(self.run.dir.path), str(status.job_id), injection.fault
        number = signal.SIGSTOP if fault is Fault.STOP_RANK else signal.SIGKILL
        if fault is Fault.PREEMPT:
            run_control.preempt([self.run.dir], self.run.environ)
        elif fault is Fault.REQUEUE:
            requeue_job(job_id, strip_job_env(self.run.environ))
        elif status.backend == "slurm":
            targets = (
                [str(injection.attempt), *map(str, injection.ranks)] if injection.ranks else ["supervisor"]
            )
            program = [sys.executable, "-P", "-m", "hpctrain.cluster.signal_processes"]
            program += [run_dir, number.name, *targets]
            run_on_host(job_id, injection.host, program, strip_job_env(self.run.environ))
        else:
            return bool(signal_ranks(run_dir, number, injection.attempt, injection.ranks))
        return True


def check_disturbable(run: Run) -> RunStatus:
    if (owner := run.dir.path.stat().st_uid) != os.geteuid():
        raise SpecError(
            f"Run {run.run_id} belongs to user {owner}, but you are user {os.geteuid()}. "
            "Faults can only be injected into your own runs."
        )
    return require_running(run, done="disturbed")
