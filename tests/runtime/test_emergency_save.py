"""Requests to the state of a rank, whose main thread is in the middle of a change or waits."""

import threading
import time
from pathlib import Path

import pytest

from hpctrain.runtime.program import emergency_save as module
from hpctrain.runtime.program.emergency_save import EmergencySave


class Numbers:
    """A state of two numbers, which are equal between changes."""

    folder = Path("/nowhere")

    def __init__(self) -> None:
        self.first = self.second = 1

    def describe(self):
        assert self.first == self.second
        return {"step": self.first}

    def save(self):
        assert self.first == self.second
        return {"path": "there", "bytes": 2}


@pytest.fixture
def armed():
    state, save = Numbers(), EmergencySave()
    save.arm(state)
    yield state, save
    save.handle(0, {"release_state": True})


def test_a_state_between_changes_is_saved(armed):
    _, save = armed
    assert save.handle(0, {"freeze_state": True}) == {"frozen_state": {"step": 1, "folder": "/nowhere"}}
    assert save.handle(0, {"save_state": 1}) is None
    answer = save.handle(0, {"save_state": 0})
    assert answer is not None
    assert answer["saved_state"]["path"] == "there"


def test_a_request_waits_for_the_end_of_a_change(armed):
    state, save = armed
    changing = threading.Event()

    def change() -> None:
        save.begin_change()
        state.first += 1
        changing.set()
        time.sleep(0.2)
        state.second += 1
        save.end_change()

    thread = threading.Thread(target=change)
    thread.start()
    changing.wait()
    assert save.handle(0, {"freeze_state": True}) == {"frozen_state": {"step": 2, "folder": "/nowhere"}}
    thread.join()


def test_a_frozen_state_does_not_change(armed):
    state, save = armed

    def change() -> None:
        save.begin_change()
        state.first = state.second = 2
        save.end_change()

    save.handle(0, {"freeze_state": True})
    thread = threading.Thread(target=change)
    thread.start()
    time.sleep(0.1)
    assert state.first == 1
    save.handle(0, {"release_state": True})
    thread.join()
    assert state.first == 2


def test_a_change_that_does_not_end_makes_the_state_unusable(armed, monkeypatch):
    _, save = armed
    monkeypatch.setattr(module, "_FREEZE_LIMIT_S", 0.1)
    save.begin_change()
    thread = threading.Thread(target=lambda: answers.append(save.handle(0, {"freeze_state": True})))
    answers: list = []
    thread.start()
    thread.join()
    assert answers == [{"frozen_state": {"why": "the state of the rank is incomplete"}}]
    save.end_change()


def test_a_save_that_does_not_end_is_an_error(armed, monkeypatch):
    _, save = armed
    monkeypatch.setattr(module, "_SAVE_LIMIT_S", 0.1)
    save.handle(0, {"freeze_state": True})
    with pytest.raises(TimeoutError, match="was not complete"):
        save.begin_change()


def test_only_a_lost_peer_delays_the_exit(armed, monkeypatch):
    _, save = armed
    monkeypatch.setattr(module, "_REQUEST_LIMIT_S", 0.1)
    save.hold_exit(RuntimeError("Connection closed by peer"))
    assert save.heartbeat()["lost_peer"]
    other = EmergencySave()
    other.arm(Numbers())
    other.hold_exit(ValueError("wrong"))
    assert not other.heartbeat()["lost_peer"]


def test_a_process_without_training_has_no_state():
    assert EmergencySave().handle(0, {"freeze_state": True}) == {"frozen_state": {"why": None}}
