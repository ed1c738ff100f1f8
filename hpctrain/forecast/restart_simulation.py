"""Simulation of `decide`: many runs on many nodes for a long time, with random faults.

Everything except the decision is a model. Nodes fail as a Poisson process, and some nodes fail far more often
than others. Runs wait for free nodes in order of submission, save at fixed times, and end after a fixed
amount of training. The simulation generates the events of each run; `History.from_events` and `decide`
process them as in a real run.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.restart_policy import REQUEUE_HOLD_S, START_S, EndKind, RestartPolicy
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

DAY_S = 86_400.0
_LEAD_S = float(JobSpec.stop_before_limit_s)
#: Frequency of each kind of interruption, in percent: faults of machines, the environment, and the user.
_FAULTS = {
    EndKind.NODE_LOST: 20,
    EndKind.GPU: 25,
    EndKind.COMMUNICATION: 15,
    EndKind.KILLED: 12,
    EndKind.SIGNAL: 8,
    EndKind.HANG: 10,
    EndKind.PYTHON: 5,
    EndKind.OOM: 3,
    EndKind.NOT_STARTED: 2,
}
#: Faults that occur mostly on bad nodes.
_NODE_FAULTS = frozenset(
    {EndKind.NODE_LOST, EndKind.GPU, EndKind.COMMUNICATION, EndKind.KILLED, EndKind.SIGNAL, EndKind.HANG}
)
#: Failures of one rank or node, after which other ranks can save the state.
_LEAVES_STATE = frozenset(
    {EndKind.NODE_LOST, EndKind.GPU, EndKind.COMMUNICATION, EndKind.KILLED, EndKind.SIGNAL}
)


@dataclass(frozen=True)
class SimulationConfig:
    """Parameters of a simulation."""

    gpus: int = 10_000
    gpus_per_node: int = 8
    days: float = 30.0
    node_mtbf_days: float = 50.0
    """Mean time between two faults of a good node."""
    bad_nodes: float = 0.01
    """Fraction of the nodes that fail a hundred times as often."""
    preemptions_per_day: float = 0.5
    """Preemptions of each run per day."""
    doomed: float = 0.03
    """Fraction of the runs whose script has a recurring error."""
    repair_days: float = 1.0
    time_limit_days: float = 2.0
    save_every_s: float = 1800.0
    emergency_checkpoints: bool = False
    """Keep the state after failures that leave other ranks alive."""
    copy_every_s: float = 0.0
    """Seconds between copies of the state in memory; 0 if surviving ranks save their states instead."""
    run_gpus: int | None = None
    """GPUs of a single run that lasts the whole period; None to simulate many runs."""
    run_needs_s: float | None = None
    """Training time of the single run until completion; None for the whole period."""
    spare_nodes: int = 0
    """Spare nodes of the single run."""
    max_failures: int = JobSpec.max_failures
    restart_s: float = START_S
    """Seconds from a failure to the next step."""
    requeue_hold_s: float = REQUEUE_HOLD_S
    """Seconds between a requeue and the earliest start of the job."""
    seed: int = 1

    @property
    def num_nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)


@dataclass
class SimulatedRun:
    """A simulated run."""

    name: str
    nodes: int
    min_nodes: int
    spares: int
    needs_s: float
    """Training time on all nodes until completion."""
    fails_after_s: float | None
    """Training time after which a faulty script raises an exception; None for a correct script."""
    trained_s: float = 0.0
    """Training time that the newest checkpoint contains."""
    memory_s: float = 0.0
    """Further training time that only an emergency checkpoint contains."""
    hosts: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    job_ends: float = 0.0
    begun: float = 0.0
    """Time at which the current attempt started to train."""
    number: int = 0
    """Number of the launch; events of earlier launches are ignored."""
    events: list[dict[str, Any]] = field(default_factory=list)
    starts_since_save: int = 0
    state: str = "waits"
    reason: str | None = None
    ended: float | None = None

    @property
    def speed(self) -> float:
        return len(self.hosts) / self.nodes


@dataclass
class SimulationResult:
    """Result of a simulation."""

    conditions: SimulationConfig
    runs: list[SimulatedRun] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """Number of attempts that ended, by kind."""
    actions: Counter[str] = field(default_factory=Counter)
    most_starts_without_progress: int = 0
    emergency_checkpoints: int = 0
    """Number of attempts that ended with an emergency checkpoint."""
    trained_s: float = 0.0
    """Node-seconds of training that was kept."""
    lost_s: float = 0.0
    """Node-seconds of repeated training and of launches."""

    @property
    def effective(self) -> float | None:
        """Effective training time ratio of a single run: training that was kept, divided by the wall time."""
        if self.conditions.run_gpus is None:
            return None
        return self.trained_s / (self.runs[0].nodes * self.conditions.days * DAY_S)

    def states(self) -> Counter[str]:
        """Return the number of runs in each state."""
        return Counter(run.state for run in self.runs)


class Simulation:
    """The cluster, its runs, and the clock."""

    def __init__(self, conditions: SimulationConfig) -> None:
        self._config = conditions
        self._random = random.Random(conditions.seed)
        self._now = 0.0
        self._queue: list[tuple[float, int, SimulatedRun, int, str]] = []
        self._num_events = 0
        names = [f"n{i}" for i in range(conditions.num_nodes)]
        count = round(conditions.bad_nodes * len(names))
        self._bad = frozenset(self._random.sample(names, count))
        self._free = set(names)
        self._down: dict[str, float] = {}
        self._waiting: list[SimulatedRun] = []
        self._policy = RestartPolicy.with_changes({}, conditions.max_failures)
        self.report = SimulationResult(conditions)

    def run(self) -> SimulationResult:
        """Simulate the whole period."""
        for run in self._new_runs():
            self.report.runs.append(run)
            self._waiting.append(run)
        self._start_waiting()
        end = self._config.days * DAY_S
        while self._queue and self._queue[0][0] <= end:
            self._now, _, run, number, what = heapq.heappop(self._queue)
            if what == "repaired":
                self._down.pop(run.name, None)
                self._free.add(run.name)
            elif what == "queued":
                self._waiting.append(run)
            elif number == run.number and run.state == "trains":
                self._attempt_ended(run, EndKind(what))
            self._start_waiting()
        for run in self.report.runs:
            if run.state == "trains":
                self._keep(run, end - run.begun, whole=True)
        return self.report

    def _new_runs(self) -> Iterator[SimulatedRun]:
        """Return the single run, or runs for 1.2 times the available node time, so that some always wait."""
        if self._config.run_gpus is not None:
            nodes = self._config.run_gpus // self._config.gpus_per_node
            spares, seconds = self._config.spare_nodes, self._config.run_needs_s
            seconds = self._config.days * DAY_S if seconds is None else seconds
            yield SimulatedRun("run-0", nodes, nodes, spares, seconds, None)
            return
        most, left = max(1, self._config.num_nodes // 20), 1.2 * self._config.num_nodes * self._config.days
        while left > 0:
            nodes = min(most, 2 ** self._random.randrange(8))
            days = self._random.uniform(0.2, 0.5 * self._config.days)
            least = max(1, nodes // 2) if self._random.random() < 0.5 else nodes
            spares = 1 if self._random.random() < 0.2 else 0
            doomed = self._random.random() < self._config.doomed
            fails = self._random.uniform(0, 2 * 3600.0) if doomed else None
            number = len(self.report.runs)
            yield SimulatedRun(f"run-{number}", nodes, least, spares, days * DAY_S, fails)
            left -= nodes * days

    def _start_waiting(self) -> None:
        """Start pending runs in order of submission; runs that do not fit are skipped."""
        for run in list(self._waiting):
            excluded_hosts = History.from_events(run.events).excluded
            # As in a real run, no node is excluded if the job could not start.
            fit = sorted(self._free - (excluded_hosts if self._can_start(run, excluded_hosts) else set()))
            if len(fit) >= (run.min_nodes if run.min_nodes < run.nodes else run.nodes + run.spares):
                granted = fit[: run.nodes + run.spares]
                self._waiting.remove(run)
                self._free.difference_update(granted)
                run.hosts, run.spare = tuple(granted[: run.nodes]), tuple(granted[run.nodes :])
                run.job_ends = self._now + self._config.time_limit_days * DAY_S
                self._start(run)

    def _start(self, run: SimulatedRun) -> None:
        """Start the ranks, and draw the event that ends them."""
        run.state, run.number = "trains", run.number + 1
        run.starts_since_save += 1
        most = self.report.most_starts_without_progress
        self.report.most_starts_without_progress = max(most, run.starts_since_save)
        run.begun = self._now + self._config.restart_s
        faulty = len(run.hosts) + 99 * len(self._bad.intersection(run.hosts))
        preemptions = self._config.preemptions_per_day / DAY_S
        ends = {
            EndKind.DONE: (run.needs_s - run.trained_s - run.memory_s) / run.speed,
            EndKind.TIME_LIMIT: run.job_ends - _LEAD_S - run.begun,
            EndKind.PREEMPTED: self._random.expovariate(preemptions) if preemptions else math.inf,
            self._fault(): self._random.expovariate(faulty / (self._config.node_mtbf_days * DAY_S)),
        }
        if run.fails_after_s is not None:
            ends[EndKind.PYTHON] = max(0.0, run.fails_after_s - run.trained_s - run.memory_s) / run.speed
        kind = min(ends, key=lambda its: ends[its])
        self._at(run.begun + max(0.0, ends[kind]), run, kind)

    def _fault(self) -> EndKind:
        return self._random.choices(list(_FAULTS), list(_FAULTS.values()))[0]

    def _at(self, moment: float, run: SimulatedRun, what: str) -> None:
        self._num_events += 1
        heapq.heappush(self._queue, (moment, self._num_events, run, run.number, what))

    def _attempt_ended(self, run: SimulatedRun, kind: EndKind) -> None:
        self.report.ends[kind] += 1
        whole = kind is EndKind.DONE or kind.is_stop
        self._keep(run, self._now - run.begun, whole=whole, in_memory=self._leaves_state(run, kind))
        lost = self._record(run, kind)
        history = History.from_events(run.events)
        found = suspect_nodes(self._policy, history)
        situation = RunSituation(
            self._policy,
            history,
            nodes=Allocation(
                run.hosts,
                run.spare,
                lost,
                run.min_nodes,
                bool(found) and self._can_start(run, history.excluded.union(found)),
            ),
            ends_at=run.job_ends,
            lead_s=_LEAD_S,
            larger_memory="mem=1024",
        )
        cause = None if kind is EndKind.DONE or kind.is_stop else str(run.events[-1]["cause"])
        decision = decide(situation, AttemptEnd(kind, cause), self._now)
        self.report.actions[decision.action.value] += 1
        if decision.exclude:
            run.events.append({"kind": "excluded", "hosts": list(decision.exclude)})
        self._act(run, decision, cause, lost)

    def _can_start(self, run: SimulatedRun, excluded_hosts: frozenset[str]) -> bool:
        return self._config.num_nodes - len(excluded_hosts) >= run.nodes + run.spares

    def _leaves_state(self, run: SimulatedRun, kind: EndKind) -> bool:
        """Return true if the failure leaves an emergency checkpoint; not if the supervisor's node is lost."""
        if not self._config.emergency_checkpoints or kind not in _LEAVES_STATE:
            return False
        return kind is not EndKind.NODE_LOST or self._random.randrange(len(run.hosts)) > 0

    def _keep(
        self, run: SimulatedRun, seconds: float, *, whole: bool = False, in_memory: bool = False
    ) -> None:
        """Count the training since the newest checkpoint that a new checkpoint contains.

        Args:
            run: the run.
            seconds: duration of the attempt.
            whole: True if the ranks have saved at the end.
            in_memory: True if memory contains the rest, or a copy of an earlier state.
        """
        trained = run.memory_s + max(0.0, seconds) * run.speed
        saves = self._config.save_every_s
        kept = trained if whole else (run.trained_s + trained) // saves * saves - run.trained_s
        kept = max(0.0, kept)
        if kept > 0:
            run.trained_s += kept
            run.starts_since_save = 0
            run.events.append({"kind": "checkpoint", "step": int(run.trained_s * 1000)})
        run.memory_s = trained - kept if in_memory else 0.0
        if copies := self._config.copy_every_s:
            run.memory_s = run.memory_s // copies * copies
        if run.memory_s > 0:
            run.starts_since_save = 0
            step = int((run.trained_s + run.memory_s) * 1000)
            run.events.append({"kind": "emergency_checkpoint", "step": step})
            self.report.emergency_checkpoints += 1
        self.report.trained_s += kept * run.nodes
        restart_s = self._config.restart_s * len(run.hosts)
        self.report.lost_s += (trained - kept - run.memory_s) * run.nodes + restart_s

    def _record(self, run: SimulatedRun, kind: EndKind) -> dict[str, str]:
        """Record the failure, and take a lost node out of service. Returns the lost node."""
        if kind is EndKind.DONE or kind.is_stop:
            return {}
        weights = [100 if host in self._bad and kind in _NODE_FAULTS else 1 for host in run.hosts]
        rank = self._random.choices(range(len(run.hosts)), weights)[0]
        host = run.hosts[rank]
        own = kind is EndKind.PYTHON and run.fails_after_s is not None
        words = "an error in the script" if own else f"{kind} {self._random.random():.9f}"
        cause = f"rank {rank} on {host}: {words}"
        refused = kind is EndKind.NOT_STARTED
        run.events.append(
            {"kind": "failure", "rank": -1 if refused else rank, "host": host, "cause": cause, "class": kind}
        )
        if kind is not EndKind.NODE_LOST:
            return {}
        self._down[host] = self._now
        repaired = SimulatedRun(host, 0, 0, 0, 0.0, None)
        self._at(self._now + self._config.repair_days * DAY_S, repaired, "repaired")
        return {host: "slurmd is not responding"}

    def _act(self, run: SimulatedRun, decision: Decision, cause: str | None, lost: dict[str, str]) -> None:
        match decision.action:
            case Action.RESTART | Action.SHRINK | Action.REPLACE:
                gone = {*lost, *decision.exclude, *decision.hosts}
                spare = tuple(host for host in run.spare if host not in gone)
                self._release({*run.hosts, *run.spare} - {*decision.hosts, *spare})
                run.hosts, run.spare = decision.hosts, spare
                self._start(run)
            case Action.REQUEUE:
                seconds = self._now - run.begun + self._config.restart_s
                kind = "requeue"
                run.events.append({"kind": kind, "seconds": seconds, "class": self._kind_of(run, cause)})
                self._end_job(run, "waits")
                self._at(self._now + self._config.requeue_hold_s, run, "queued")
            case Action.COMPLETE:
                self._end_job(run, "complete")
            case _:
                run.reason = "; ".join(filter(None, [cause, decision.reason]))
                self._end_job(run, "failed")

    def _kind_of(self, run: SimulatedRun, cause: str | None) -> EndKind:
        return EndKind.PREEMPTED if cause is None else EndKind(run.events[-1].get("class", EndKind.KILLED))

    def _end_job(self, run: SimulatedRun, state: str) -> None:
        self.report.lost_s += run.memory_s * run.nodes
        run.memory_s = 0.0
        self._release({*run.hosts, *run.spare})
        run.hosts, run.spare, run.state = (), (), state
        if state in ("complete", "failed"):
            run.ended = self._now

    def _release(self, hosts: set[str]) -> None:
        self._free.update(hosts - self._down.keys())
