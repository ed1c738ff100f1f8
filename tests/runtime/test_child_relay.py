"""Choice of the process of a command that the supervisor observes."""

from __future__ import annotations

import json

import pytest
from helpers.waiting import wait_for

from hpctrain.cluster import detect
from hpctrain.rundir import CHILD_VARIABLE
from hpctrain.runtime.program.child_relay import ChildRelay, connect_to_worker
from hpctrain.runtime.supervisor_connection import Connection


class FakeConnection:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)


@pytest.fixture
def own() -> list[dict]:
    """Messages that the worker handled itself."""
    return []


@pytest.fixture
def relay(own) -> ChildRelay:
    return ChildRelay(detect({}), lambda: {"beats": 0, "step": 0}, lambda _, message: own.append(message))


def connect(relay: ChildRelay) -> Connection:
    return connect_to_worker(json.loads(relay.variables[CHILD_VARIABLE])["socket"])


def beat(connection: Connection, relay: ChildRelay, beats: int, step: int, observed: int) -> None:
    """Send a heartbeat, and wait until the observed process is the one with that number of beats."""
    connection.send({"beats": beats, "step": step, "modules": ["torch"]})
    wait_for(lambda: relay.heartbeat_message()["beats"] == observed, 10, f"the beat {observed}")


def test_process_with_steps_is_observed_first_and_the_worker_last(relay, own):
    supervisor = FakeConnection()
    relay.on_message(supervisor, {"tell": 1})
    assert own == [{"tell": 1}]
    launcher, trainer, helper = connect(relay), connect(relay), connect(relay)
    beat(launcher, relay, 1, step=0, observed=1)
    beat(trainer, relay, 2, step=0, observed=1)
    beat(trainer, relay, 3, step=1, observed=3)
    beat(helper, relay, 4, step=2, observed=3)
    assert relay.heartbeat_message()["modules"] == []
    relay.on_message(supervisor, {"tell": 2})
    assert trainer.receive(10) == {"tell": 2}
    helper.send({"told": "helper"})
    trainer.send({"told": "trainer"})
    wait_for(lambda: supervisor.sent, 10, "the answer")
    assert supervisor.sent == [{"told": "trainer"}]
    assert len(own) == 1
    for connection in (trainer, helper):
        connection.close()
    wait_for(lambda: relay.heartbeat_message()["beats"] == 1, 10, "the launcher")
    launcher.close()
    relay.wait_until_exited(10)
    assert relay.heartbeat_message()["beats"] == 0
