"""Choice of the rank that saves the state after the failure of another rank."""

from typing import Any

import pytest

from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.launch.job_step import EmergencySaveEnded, StepEvent
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.workers.emergency_request import EmergencyRequest

HEARTBEAT = {"emergency": {"folder": "/dev/shm/x", "lost_peer": False}}
SAVED = {"saved_state": {"path": "/dev/shm/x/step-00000007", "bytes": 10, "seconds": 0.1}}


class Ranks:
    """Records what a request sends and reports."""

    def __init__(self, *ranks: int) -> None:
        self.sent: list[Any] = []
        self.events: list[StepEvent] = []
        self.request = EmergencyRequest(self.sent.append, self.events.append)
        for rank in ranks:
            self.request.on_message(rank, HEARTBEAT)

    def report(self, rank: int, step: int, read: int) -> None:
        state = {"step": step, "read": read, "trained": True, "buffers_change": False, "files": "000-a"}
        self.request.on_message(rank, {"frozen_state": state})


def test_a_rank_with_the_newest_state_saves():
    ranks = Ranks(0, 1, 3)
    assert ranks.request.begin()
    ranks.report(0, 6, 6)
    ranks.report(3, 7, 6)
    assert ranks.sent == [{"freeze_state": True}]
    ranks.report(1, 7, 5)
    assert ranks.sent == [{"freeze_state": True}, {"save_state": 3}]
    ranks.request.on_message(3, SAVED)
    (ended,) = ranks.events
    assert isinstance(ended, EmergencySaveEnded)
    assert ended.record["step"] == 7
    assert ended.record["read"] == 6
    assert ended.record["rank"] == 3


def test_a_rank_that_disconnects_is_not_awaited():
    ranks = Ranks(0, 1)
    ranks.request.begin()
    ranks.report(0, 6, 6)
    ranks.request.on_disconnect(1)
    assert ranks.sent[-1] == {"save_state": 0}


def test_a_rank_that_disconnects_after_its_answer_does_not_save():
    ranks = Ranks(0, 1)
    ranks.request.begin()
    ranks.report(0, 7, 6)
    ranks.request.on_disconnect(0)
    ranks.report(1, 6, 6)
    assert ranks.sent[-1] == {"save_state": 1}


def test_a_rank_without_a_usable_state_is_not_awaited():
    """Such as a rank on a lost node, in a training on GPUs."""
    ranks = Ranks()
    for rank in (0, 1):
        ranks.request.on_message(rank, {"emergency": {"folder": None, "lost_peer": False}})
    ranks.request.begin()
    ranks.request.check()
    assert ranks.events == []
    ranks.request.on_message(0, {"frozen_state": {"why": "surviving ranks cannot save their states on GPUs"}})
    assert ranks.events == [EmergencySaveEnded({}, "surviving ranks cannot save their states on GPUs")]


def test_without_a_complete_state_the_ranks_are_released():
    ranks = Ranks(0, 1)
    ranks.request.begin()
    for rank in (0, 1):
        ranks.request.on_message(rank, {"frozen_state": {"why": "the state of the rank is incomplete"}})
    assert ranks.sent[-1] == {"release_state": True}
    assert ranks.events == [EmergencySaveEnded({}, "the state of the rank is incomplete")]


def test_the_failure_of_the_saving_rank_releases_the_others():
    ranks = Ranks(0, 1)
    ranks.request.begin()
    ranks.report(0, 6, 6)
    ranks.report(1, 6, 6)
    ranks.request.on_disconnect(0)
    assert ranks.events == [EmergencySaveEnded({}, "rank 0 failed before it had saved the state")]


def test_a_rank_that_lost_a_peer_begins_the_request():
    ranks = Ranks(0)
    ranks.request.on_message(0, {"emergency": {**HEARTBEAT["emergency"], "lost_peer": True}})
    assert ranks.sent == [{"freeze_state": True}]


def test_without_ranks_nothing_is_requested():
    ranks = Ranks()
    assert not ranks.request.begin()
    assert ranks.sent == []


@pytest.mark.parametrize("why", ["surviving ranks cannot save their states on GPUs", None])
def test_a_training_without_emergency_checkpoints_reports_the_reason(why):
    """A script without the Trainer has no reason."""
    ranks = Ranks(0)
    assert ranks.request.begin()
    ranks.request.on_message(0, {"frozen_state": {"why": why}})
    assert ranks.events == [EmergencySaveEnded({}, why or "")]


def test_history_keeps_the_newest_emergency_checkpoint_until_a_checkpoint_is_as_new():
    state = {
        "step": 7,
        "read": 6,
        "trained": True,
        "buffers_change": False,
        "files": "002-a",
        "world_size": 4,
    }
    saved = {"kind": "emergency_checkpoint", "attempt": 2, **state}
    failure = {"kind": "failure", "rank": 0, "host": "n1", "class": "killed"}
    history = History.from_events([failure, failure, saved, failure])
    assert history.emergency is not None
    assert history.emergency["step"] == 7
    assert len(history.crashes) == len(history.failures) == 1
    assert History.from_events([saved, {"kind": "checkpoint", "step": 7}]).emergency is None
    assert History.from_events([saved, {"kind": "checkpoint", "step": 6}]).emergency is not None
    requeued, kept = {"kind": "requeue", "class": "killed"}, {"kind": "emergency_kept", "step": 7}
    assert History.from_events([saved, requeued]).emergency is None
    assert History.from_events([saved, kept, requeued]).emergency == history.emergency
    assert History.from_events([saved, kept, requeued, requeued]).emergency is None
    wrong = {**failure, "class": EndKind.CORRUPTION.value, "verified_step": 5}
    assert History.from_events([saved, wrong, {"kind": "resumed", "step": 5}]).emergency is None
    assert History.from_events([saved, {**failure, "class": EndKind.OOM.value}]).emergency is None
    none = {**saved, "step": None, "reason": "surviving ranks cannot save their states on GPUs"}
    assert History.from_events([none]).emergency is None
