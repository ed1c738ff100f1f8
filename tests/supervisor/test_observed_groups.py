"""Several process groups of an adopted batch script, each with its own ranks."""

import signal
from typing import Any

import msgspec
import pytest

from hpctrain import system
from hpctrain.record_types import RankMessage
from hpctrain.rundir import RunDir
from hpctrain.supervisor.launch.job_step import HangDetected
from hpctrain.supervisor.workers.hang_detection import PhaseLimits
from hpctrain.supervisor.workers.observed_groups import ObservedGroups, RankLoss
from hpctrain.supervisor.workers.rank_monitor import RankMonitor


class Supervisor:
    """Records the messages to the members, and the events."""

    def __init__(self, tmp_path) -> None:
        self.sent: list[tuple[dict[str, Any], list[int]]] = []
        self.events: list[Any] = []

        def new_monitor(send, host_of, world_size) -> RankMonitor:
            step: Any = None
            limits = PhaseLimits(0.0)
            run = RunDir(tmp_path)
            return RankMonitor(run, 0, step, send, self.events.append, limits, host_of, world_size)

        def send(message, keys) -> int:
            self.sent.append((dict(message), sorted(keys)))
            return len(keys)

        self.links: list[tuple[int, int, str, int]] = []
        self.groups = ObservedGroups(send, new_monitor, lambda *link: self.links.append(link))

    def join(self, group: str, rank: int, world_size: int = 2) -> int:
        introduction = {"group": group, "rank": rank, "world_size": world_size, "host": f"n{rank}"}
        introduction["outputs"] = [[f"{group}-{rank}.log", rank]]
        return self.groups.join({**introduction, "in_step": True})

    def beat(self, key: int, step: int, **fields: object) -> None:
        message: dict[str, object] = {
            "phase": "script",
            "step": step,
            "beats": step,
            "spent": [0, 0, 0],
            "timed": [0, 0],
        }
        self.receive(key, {**message, **fields})

    def receive(self, key: int, message: dict[str, object]) -> None:
        self.groups.on_message(key, msgspec.convert(message, RankMessage))


@pytest.fixture
def supervisor(tmp_path) -> Supervisor:
    return Supervisor(tmp_path)


def test_each_group_agrees_on_its_own_last_step(supervisor):
    left = [supervisor.join("a", rank) for rank in range(2)]
    right = [supervisor.join("b", rank) for rank in range(2)]
    for key, step in zip([*left, *right], (3, 4, 8, 9), strict=True):
        supervisor.beat(key, step)
    supervisor.beat(left[1], 4, stop=True)
    assert supervisor.sent == [({"prepare_stop": True}, left)]
    for key, step in zip([*left, *right], (4, 5, 9, 10), strict=True):
        supervisor.receive(key, {"can_stop_after": step})
    assert supervisor.sent[1:] == [({"stop_after": 5}, left), ({"stop_after": 10}, right)]


def test_stop_request_reaches_processes_that_start_later(supervisor):
    key = supervisor.join("a", 0, 1)
    supervisor.groups.stop(signal.SIGTERM)
    later = supervisor.join("b", 0, 1)
    for _ in range(2):
        supervisor.beat(later, 0)
    message = {"stop_signal": "SIGTERM"}
    assert supervisor.sent == [(message, [key]), (message, [later])]


def test_next_launch_with_the_same_rendezvous_is_another_group(supervisor):
    """Such as of `torchrun --rdzv-endpoint` in a loop, or after a restart by torchrun itself."""
    for key in [supervisor.join("a", rank) for rank in range(2)]:
        supervisor.beat(key, 5)
        supervisor.groups.on_disconnect(key)
    first, second = supervisor.join("a", 0, 1), supervisor.join("a", 0, 1)
    supervisor.beat(first, 7, stop=True)  # replaced
    assert supervisor.sent == []
    supervisor.beat(second, 1, stop=True)
    assert supervisor.sent == [({"prepare_stop": True}, [second])]


def test_only_groups_that_train_can_hang(supervisor):
    """The hang names the rank and node within the group. A process that only imports torch may be idle."""
    idle = supervisor.join("idle", 0, 1)
    supervisor.beat(idle, 0, phase="start")
    supervisor.groups.on_tick()
    assert supervisor.sent == []
    keys = [supervisor.join("a", rank) for rank in range(2)]
    for key in keys:
        supervisor.beat(key, 2)
    supervisor.groups.on_tick()
    assert supervisor.sent == [({"tell": True}, keys)]
    for key, waits in zip(keys, (True, False), strict=True):
        told = {"phase": "script", "step": 2, "place": f"main (train.py:{key})", "waits": waits}
        supervisor.receive(key, {"told": told})
        supervisor.receive(key, {"written": True})
    supervisor.groups.on_tick()
    (hang,) = supervisor.events
    assert isinstance(hang, HangDetected)
    assert (hang.rank, hang.host) == (1, "n1")
    assert "rank 1 on n1 is in main (train.py:2)" in hang.cause


def test_failures_before_another_launch_or_a_long_time_alone_are_survived(supervisor, monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(system, "time", lambda: clock)
    keys = [supervisor.join("a", rank) for rank in range(2)]
    clock = 1100.0
    for key in keys:
        supervisor.groups.on_disconnect(key)
    clock = 1110.0
    assert supervisor.groups.survival().until == 0.0
    clock = 1200.0
    assert supervisor.groups.survival().until == 1100.0
    key = supervisor.join("b", 0)
    assert supervisor.groups.survival().until == 1200.0
    # A rank that has failed before another of its group arrives.
    clock = 1201.0
    supervisor.groups.on_disconnect(key)
    supervisor.join("b", 1)
    assert supervisor.groups.survival().until == 1200.0


def test_training_that_was_killed_is_survived_only_by_a_later_training(supervisor, monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(system, "time", lambda: clock)
    killed, peer = (supervisor.join("a", rank) for rank in range(2))
    other = supervisor.join("beside", 0, 1)
    for key in (killed, peer, other):
        supervisor.beat(key, 1)
    supervisor.receive(peer, {"exits": True})
    clock = 1100.0
    for key in (killed, peer):
        supervisor.groups.on_disconnect(key)
    supervisor.beat(other, 2)
    # It has only lost its connection.
    supervisor.groups.on_disconnect(other)
    supervisor.beat(supervisor.join("beside", 0, 1), 3)
    evaluation = supervisor.join("evaluation", 0, 1)
    supervisor.beat(evaluation, 0)
    supervisor.groups.on_disconnect(evaluation)
    survival = supervisor.groups.survival()
    (loss,) = survival.losses
    assert (loss.rank, loss.host, loss.time, loss.has_trained) == (0, "n0", 1100.0, True)
    clock = 1200.0
    assert not supervisor.groups.survival().covers(loss)
    supervisor.beat(supervisor.join("later", 0, 1), 1)
    assert supervisor.groups.survival().covers(loss)


def test_ranks_that_torchrun_restarts_survive_the_failure(supervisor, monkeypatch):
    clock = 1000.0
    monkeypatch.setattr(system, "time", lambda: clock)
    for key in [supervisor.join("a", rank) for rank in range(2)]:
        supervisor.beat(key, 1)
    clock = 1100.0
    # The old rank 0 is still connected.
    restarted = [supervisor.join("a", rank) for rank in (1, 0)]
    failure = RankLoss(1, "n1", 1050.0, has_trained=True)
    assert not supervisor.groups.survival().covers(failure)
    supervisor.beat(restarted[0], 1)
    assert supervisor.groups.survival().covers(failure)


def test_files_of_one_group_at_once_are_logs(supervisor):
    """A process that trains no steps does not replace the group that trains, nor does a second training."""
    server = supervisor.join("server", 0, 1)
    supervisor.beat(server, 0)
    assert supervisor.links == [], "it may not train"
    helpers = [supervisor.join("helper", rank) for rank in range(2)]
    supervisor.beat(helpers[1], 0)
    left, right = ([supervisor.join(group, rank) for rank in range(2)] for group in ("left", "right"))
    for key in (*left, *right, *left, helpers[0]):
        supervisor.beat(key, 1)
    assert supervisor.links == [(1, 1, "helper-1.log", 1), (2, 0, "left-0.log", 0), (3, 1, "left-1.log", 1)]
    for key in left:
        supervisor.groups.on_disconnect(key)
    supervisor.beat(right[1], 2)
    assert supervisor.links[3:] == [(4, 1, "right-1.log", 1)]
