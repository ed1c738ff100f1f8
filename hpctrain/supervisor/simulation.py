"""Many runs on many nodes for a long time, with faults at random: what `decide` makes of them.

Everything around the decision is a model: nodes fail as a Poisson process, some of them far more often than
others; runs wait for free nodes in the order in which they came, save at fixed times, and end when they have
trained enough. The events that a run's record would have are made, and `History.of` and `decide` see
them as they do in a real run.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain.jobs.restart import Kind, Policy
from hpctrain.supervisor.decide import Action, Decision, End, Nodes, State, decide, suspects
from hpctrain.supervisor.history import History

DAY_S = 86_400.0
#: Slurm's hold of a requeued job, and what a start of the ranks takes.
_HOLD_S, _START_S = 120.0, 60.0
_LEAD_S = 120.0
_MAX_FAILURES = 3
#: What an interruption is, out of a hundred: faults of machines and of the world around, and a user's own.
_FAULTS = {
    Kind.NODE_LOST: 20,
    Kind.GPU: 25,
    Kind.NCCL: 15,
    Kind.KILLED: 12,
    Kind.SIGNAL: 8,
    Kind.HANG: 10,
    Kind.PYTHON: 5,
    Kind.OOM: 3,
    Kind.NOT_STARTED: 2,
}
#: A fault of one of these happens on a node that is at fault more often than not.
_OF_NODES = frozenset({Kind.NODE_LOST, Kind.GPU, Kind.NCCL, Kind.KILLED, Kind.SIGNAL, Kind.HANG})


@dataclass(frozen=True)
class Conditions:
    """What is simulated."""

    gpus: int = 10_000
    gpus_per_node: int = 8
    days: float = 30.0
    node_mtbf_days: float = 50.0
    """Mean time between two faults of a good node."""
    bad_nodes: float = 0.01
    """Share of the nodes that fail a hundred times as often."""
    preemptions_per_day: float = 0.5
    """Of a run."""
    doomed: float = 0.03
    """Share of the runs whose script has an error that comes again and again."""
    repair_days: float = 1.0
    time_limit_days: float = 2.0
    save_every_s: float = 1800.0
    seed: int = 1

    @property
    def num_nodes(self) -> int:
        return max(1, self.gpus // self.gpus_per_node)


@dataclass
class Run:
    """One training among the others."""

    name: str
    nodes: int
    least: int
    spares: int
    needs_s: float
    """Training on all its nodes until it is complete."""
    fails_after_s: float | None
    """Training after which a script with an error raises; None for a good one."""
    trained_s: float = 0.0
    """What the newest checkpoint holds."""
    hosts: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    job_ends: float = 0.0
    begun: float = 0.0
    """When the ranks of now began to train."""
    number: int = 0
    """Which start it is: an event of an earlier one is void."""
    events: list[dict[str, Any]] = field(default_factory=list)
    starts_since_save: int = 0
    state: str = "waits"
    why: str | None = None
    ended: float | None = None

    @property
    def speed(self) -> float:
        return len(self.hosts) / self.nodes


@dataclass
class Report:
    """What came of it."""

    conditions: Conditions
    runs: list[Run] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    """How often attempts ended, by kind."""
    actions: Counter[str] = field(default_factory=Counter)
    most_starts_without_progress: int = 0
    trained_s: float = 0.0
    """Time of nodes in training that was kept."""
    lost_s: float = 0.0
    """Time of nodes in training that had to be done again, and in starts."""

    def states(self) -> Counter[str]:
        """How many runs are complete, have failed, go on, or wait."""
        return Counter(run.state for run in self.runs)


class Simulation:
    """The cluster, its runs, and the clock."""

    def __init__(self, conditions: Conditions) -> None:
        self._its = conditions
        self._random = random.Random(conditions.seed)
        self._now = 0.0
        self._queue: list[tuple[float, int, Run, int, str]] = []
        self._num_events = 0
        names = [f"n{i}" for i in range(conditions.num_nodes)]
        count = round(conditions.bad_nodes * len(names))
        self._bad = frozenset(self._random.sample(names, count))
        self._free = set(names)
        self._down: dict[str, float] = {}
        self._waiting: list[Run] = []
        self._policy = Policy.of({}, _MAX_FAILURES)
        self.report = Report(conditions)

    def run(self) -> Report:
        """Let all the time pass."""
        for run in self._new_runs():
            self.report.runs.append(run)
            self._waiting.append(run)
        self._start_waiting()
        end = self._its.days * DAY_S
        while self._queue and self._queue[0][0] <= end:
            self._now, _, run, number, what = heapq.heappop(self._queue)
            if what == "repaired":
                self._down.pop(run.name, None)
                self._free.add(run.name)
            elif what == "queued":
                self._waiting.append(run)
            elif number == run.number and run.state == "trains":
                self._attempt_ended(run, Kind(what))
            self._start_waiting()
        for run in self.report.runs:
            if run.state == "trains":
                self._keep(run, end - run.begun)
        return self.report

    def _new_runs(self) -> Iterator[Run]:
        """Runs for somewhat more than all the time of all the nodes, so that there is one that waits."""
        most, left = max(1, self._its.num_nodes // 20), 1.2 * self._its.num_nodes * self._its.days
        while left > 0:
            nodes = min(most, 2 ** self._random.randrange(8))
            days = self._random.uniform(0.2, 0.5 * self._its.days)
            least = max(1, nodes // 2) if self._random.random() < 0.5 else nodes
            spares = 1 if self._random.random() < 0.2 else 0
            doomed = self._random.random() < self._its.doomed
            fails = self._random.uniform(0, 2 * 3600.0) if doomed else None
            number = len(self.report.runs)
            yield Run(f"run-{number}", nodes, least, spares, days * DAY_S, fails)
            left -= nodes * days

    def _start_waiting(self) -> None:
        """First come, first served; whoever fits passes one that does not."""
        for run in list(self._waiting):
            left_out = History.of(run.events).excluded
            fit = sorted(self._free - left_out)
            if len(fit) >= (run.least if run.least < run.nodes else run.nodes + run.spares):
                granted = fit[: run.nodes + run.spares]
                self._waiting.remove(run)
                self._free.difference_update(granted)
                run.hosts, run.spare = tuple(granted[: run.nodes]), tuple(granted[run.nodes :])
                run.job_ends = self._now + self._its.time_limit_days * DAY_S
                self._start(run)

    def _start(self, run: Run) -> None:
        """Start the ranks, and find out what will end them."""
        run.state, run.number = "trains", run.number + 1
        run.starts_since_save += 1
        most = self.report.most_starts_without_progress
        self.report.most_starts_without_progress = max(most, run.starts_since_save)
        run.begun = self._now + _START_S
        faulty = sum(100 if host in self._bad else 1 for host in run.hosts)
        ends = {
            Kind.DONE: (run.needs_s - run.trained_s) / run.speed,
            Kind.TIME_LIMIT: run.job_ends - _LEAD_S - run.begun,
            Kind.PREEMPTED: self._random.expovariate(self._its.preemptions_per_day / DAY_S),
            self._fault(): self._random.expovariate(faulty / (self._its.node_mtbf_days * DAY_S)),
        }
        if run.fails_after_s is not None:
            ends[Kind.PYTHON] = max(0.0, run.fails_after_s - run.trained_s) / run.speed
        kind = min(ends, key=lambda its: ends[its])
        self._at(run.begun + max(0.0, ends[kind]), run, kind)

    def _fault(self) -> Kind:
        return self._random.choices(list(_FAULTS), list(_FAULTS.values()))[0]

    def _at(self, moment: float, run: Run, what: str) -> None:
        self._num_events += 1
        heapq.heappush(self._queue, (moment, self._num_events, run, run.number, what))

    def _attempt_ended(self, run: Run, kind: Kind) -> None:
        self.report.ends[kind] += 1
        self._keep(run, self._now - run.begun, whole=kind is Kind.DONE or kind.is_stop)
        lost = self._record(run, kind)
        history = History.of(run.events)
        found = suspects(self._policy, history)
        state = State(
            self._policy,
            history,
            nodes=Nodes(run.hosts, run.spare, lost, run.least, self._others_fit(run, history, found)),
            ends_at=run.job_ends,
            lead_s=_LEAD_S,
        )
        cause = None if kind is Kind.DONE or kind.is_stop else str(run.events[-1]["cause"])
        decision = decide(state, End(kind, cause), self._now)
        self.report.actions[decision.action.value] += 1
        if decision.exclude:
            run.events.append({"kind": "excluded", "hosts": list(decision.exclude)})
        self._act(run, decision, cause, lost)

    def _others_fit(self, run: Run, history: History, found: dict[str, str]) -> bool:
        return (
            bool(found) and self._its.num_nodes - len(history.excluded.union(found)) >= run.nodes + run.spares
        )

    def _keep(self, run: Run, seconds: float, *, whole: bool = False) -> None:
        """Count what was trained since the start of the ranks, as far as a checkpoint holds it."""
        trained = max(0.0, seconds) * run.speed
        saves = self._its.save_every_s
        kept = trained if whole else (run.trained_s + trained) // saves * saves - run.trained_s
        kept = max(0.0, kept)
        if kept > 0:
            run.trained_s += kept
            run.starts_since_save = 0
            run.events.append({"kind": "checkpoint", "step": int(run.trained_s * 1000)})
        self.report.trained_s += kept * run.nodes
        self.report.lost_s += (trained - kept) * run.nodes + _START_S * len(run.hosts)

    def _record(self, run: Run, kind: Kind) -> dict[str, str]:
        """Write the failure down, and take the node out that is lost. Returns that."""
        if kind is Kind.DONE or kind.is_stop:
            return {}
        weights = [100 if host in self._bad and kind in _OF_NODES else 1 for host in run.hosts]
        rank = self._random.choices(range(len(run.hosts)), weights)[0]
        host = run.hosts[rank]
        own = kind is Kind.PYTHON and run.fails_after_s is not None
        words = "an error of the script" if own else f"{kind} {self._random.random():.9f}"
        cause = f"rank {rank} on {host}: {words}"
        refused = kind is Kind.NOT_STARTED
        run.events.append(
            {"kind": "failure", "rank": -1 if refused else rank, "host": host, "cause": cause, "class": kind}
        )
        if kind is not Kind.NODE_LOST:
            return {}
        self._down[host] = self._now
        repaired = Run(host, 0, 0, 0, 0.0, None)
        self._at(self._now + self._its.repair_days * DAY_S, repaired, "repaired")
        return {host: "does not answer"}

    def _act(self, run: Run, decision: Decision, cause: str | None, lost: dict[str, str]) -> None:
        match decision.action:
            case Action.RESTART | Action.SHRINK | Action.REPLACE:
                gone = {*lost, *decision.exclude}
                spare = tuple(host for host in run.spare if host not in decision.hosts and host not in gone)
                self._release({*run.hosts, *run.spare} - {*decision.hosts, *spare})
                run.hosts, run.spare = decision.hosts, spare
                self._start(run)
            case Action.REQUEUE:
                seconds = self._now - run.begun + _START_S
                kind = "requeue"
                run.events.append({"kind": kind, "seconds": seconds, "class": self._kind_of(run, cause)})
                self._end_job(run, "waits")
                self._at(self._now + _HOLD_S, run, "queued")
            case Action.COMPLETE:
                self._end_job(run, "complete")
            case _:
                run.why = "; ".join(filter(None, [cause, decision.why]))
                self._end_job(run, "failed")

    def _kind_of(self, run: Run, cause: str | None) -> Kind:
        return Kind.PREEMPTED if cause is None else Kind(run.events[-1].get("class", Kind.KILLED))

    def _end_job(self, run: Run, state: str) -> None:
        self._release({*run.hosts, *run.spare})
        run.hosts, run.spare, run.state = (), (), state
        if state in ("complete", "failed"):
            run.ended = self._now

    def _release(self, hosts: set[str]) -> None:
        self._free.update(hosts - self._down.keys())
