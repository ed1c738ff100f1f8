"""Monitor the process groups that an adopted batch script starts, each like the ranks of an attempt."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpctrain import system
from hpctrain.record_types import FailureRecord, RankMessage, RankPhase
from hpctrain.supervisor.workers.rank_monitor import RankMonitor

#: Launchers and srun end within this time after their last rank.
_SURVIVED_S = 60.0
#: Seconds without a heartbeat, which each process sends every second, after which its node may be lost.
_LOST_S = 30.0
#: Sends a message to the members with these keys.
Send = Callable[[Mapping[str, Any], Iterable[int]], int]


class RankLoss(NamedTuple):
    """A rank that was killed, or has crashed in native code, at a time in seconds since the epoch."""

    rank: int
    host: str
    time: float
    has_trained: bool


class Survival(NamedTuple):
    """The failures of its ranks that a batch script has survived; times in seconds since the epoch."""

    until: float = 0.0
    """Time until which it has survived failures of ranks that had not trained."""
    retrained_at: float = 0.0
    """Launch of the newest ranks that trained, which shows that it has survived earlier failures."""
    losses: tuple[RankLoss, ...] = ()

    def covers(self, failure: RankLoss | FailureRecord) -> bool:
        return failure.time < (self.retrained_at if failure.has_trained else self.until)


NOTHING_SURVIVED = Survival()


@dataclass
class _Group:
    name: str
    monitor: RankMonitor
    hosts: dict[int, str]
    """Host of each rank."""
    launched_at: float
    """Seconds since the epoch."""
    ranks: dict[int, int]
    """Rank of each member."""
    trains: bool = False
    trained: set[int] = field(default_factory=set)
    """Members with steps."""
    outputs: dict[int, list[tuple[str, int]]] = field(default_factory=dict)
    """Paths of the files that a rank writes, and their lengths before; empty once they are linked."""


class ObservedGroups:
    """Replaces the `RankMonitor` of an attempt. Members have keys, because several groups have a rank 0."""

    def __init__(
        self,
        send: Send,
        new_monitor: Callable[[Callable[[Mapping[str, Any]], int], Callable[[int], str], int], RankMonitor],
        link_log: Callable[[int, int, str, int], None],
    ) -> None:
        self._send, self._new_monitor, self._link_log = send, new_monitor, link_log
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[int, _Group] = {}
        self._num_members = self._num_logs = 0
        #: The group whose ranks have logs.
        self._logged: _Group | None = None
        #: True if no srun has started some ranks.
        self.has_ranks_outside_steps = False
        #: Set when a rank that has received a signal asks the others to stop.
        self.ask_to_stop = system.Event()
        self._asking: set[int] = set()
        #: Times of the newest launch after the first, and of the end of the last rank, since the epoch.
        self._launched_at = self._left_at = self._retrained_at = 0.0
        self._exiting: set[int] = set()
        self._heard_at: dict[int, float] = {}
        self._losses: dict[tuple[str, int], RankLoss] = {}
        self._stop_signal: signal.Signals | None = None
        self._asked: set[int] = set()

    def join(self, introduction: Mapping[str, Any]) -> int:
        """Add a process to its group, and return its key."""
        name, rank, host = str(introduction["group"]), int(introduction["rank"]), str(introduction["host"])
        self.has_ranks_outside_steps |= not introduction["in_step"]
        group = self._groups.get(name)
        # A process connects once before it reports.
        if group is None or (group.trains and not group.ranks and rank in group.hosts):
            hosts: dict[int, str] = {}
            members: dict[int, int] = {}
            monitor = self._new_monitor(
                lambda message: self._send(message, list(members)),
                lambda rank: hosts.get(rank, "an unknown host"),
                int(introduction["world_size"]),
            )
            if self._groups:
                self._launched_at = system.time()
            group = self._groups[name] = _Group(name, monitor, hosts, system.time(), members)
        elif rank in group.hosts:  # torchrun has restarted it, or it had only lost its connection.
            group.launched_at = system.time()
        self._losses.pop((name, rank), None)
        key, self._num_members = self._num_members, self._num_members + 1
        self._heard_at[key] = system.monotonic()
        for stale in [member for member, its_rank in group.ranks.items() if its_rank == rank]:
            del group.ranks[stale], self._group_of[stale]
        group.ranks[key], group.hosts[rank], self._group_of[key] = rank, host, group
        group.outputs.setdefault(rank, introduction.get("outputs", []))
        return key

    def on_message(self, key: int, message: RankMessage) -> None:
        if (group := self._group_of.get(key)) is None:
            return
        self._heard_at[key] = system.monotonic()
        group.trains |= len(group.ranks) > 1 or message.step > 0 or message.phase == RankPhase.JOIN
        if message.step > 0:
            group.trained.add(key)
            self._retrained_at = max(self._retrained_at, group.launched_at)
        if message.exits:
            self._exiting.add(key)
        self._link_logs(group, group.ranks[key])
        group.monitor.on_message(group.ranks[key], message)
        if message.stop and key not in self._asking:
            self._asking.add(key)
            self.ask_to_stop.set()
        if self._stop_signal is not None and key not in self._asked:
            self._ask_to_stop([key], self._stop_signal)

    def on_disconnect(self, key: int) -> None:
        if (group := self._group_of.pop(key, None)) is not None:
            rank, self._left_at = group.ranks.pop(key), system.time()
            group.monitor.on_disconnect(rank)
            if group.trains and key not in self._exiting:
                loss = RankLoss(rank, group.hosts[rank], self._left_at, key in group.trained)
                self._losses[group.name, rank] = loss

    def on_tick(self) -> None:
        for group in list(self._groups.values()):
            # A process that imports torch without training, such as a server, may be idle.
            if group.ranks and group.trains:
                group.monitor.on_tick()

    def are_connected(self, ranks: list[int]) -> bool:
        return any(group.monitor.are_connected(ranks) for group in list(self._groups.values()) if group.ranks)

    def stop(self, number: signal.Signals) -> None:
        """Ask all members to stop, and those that join later."""
        self._stop_signal = number
        self._ask_to_stop(list(self._group_of), number)

    def has_ranks(self) -> bool:
        """Return true if processes are connected, but not only those of nodes that are lost."""
        since = system.monotonic() - _LOST_S
        return any(self._heard_at[key] > since for key in list(self._group_of))

    def survival(self) -> Survival:
        """Return the failures that the script has survived.

        It survived the failure of a training if it trained again afterwards, and that of other ranks also if
        it started any ranks, or ran for a while without.
        """
        is_alone = not self._group_of and system.time() - self._left_at > _SURVIVED_S
        until = max(self._launched_at, self._left_at if is_alone else 0.0)
        return Survival(until, self._retrained_at, tuple(self._losses.values()))

    def close(self) -> None:
        for group in list(self._groups.values()):
            group.monitor.close()

    def _link_logs(self, group: _Group, rank: int) -> None:
        """Let logs of the run show the files of a rank, for one of the groups that run at once."""
        logged = self._logged
        if group.trains and (not logged or not logged.ranks or (group.trained and not logged.trained)):
            self._logged = group
        if group is self._logged and group.outputs[rank]:
            for path, length in group.outputs[rank]:
                self._num_logs += 1
                self._link_log(self._num_logs, rank, path, length)
            group.outputs[rank] = []

    def _ask_to_stop(self, keys: list[int], number: signal.Signals) -> None:
        self._asked.update(keys)
        self._send({"stop_signal": number.name}, keys)
