"""Choice of the process of a command that the supervisor observes."""

import json
import secrets
import signal
import socket
import subprocess
import sys
from types import ModuleType

from helpers.waiting import wait_for
from test_heartbeat import FakeConnection

from hpctrain.cluster import detect
from hpctrain.rundir import CHILD_VARIABLE
from hpctrain.runtime.program import process_observer
from hpctrain.runtime.program.process_observer import ChildRelay, connect_to_worker
from hpctrain.runtime.rank_activity import has_process_group
from hpctrain.runtime.supervisor_connection import Connection


class FakeWorker:
    ranks = detect({})

    def __init__(self) -> None:
        self.handled: list[dict] = []

    def heartbeat_message(self) -> dict:
        return {"beats": 0, "step": 0}

    def on_message(self, _connection: object, message: dict) -> None:
        self.handled.append(message)


def connect(relay: ChildRelay) -> Connection:
    return connect_to_worker(json.loads(relay.variables[CHILD_VARIABLE])["socket"])


def beat(connection: Connection, relay: ChildRelay, beats: int, step: int, observed: int) -> None:
    """Send a heartbeat, and wait until the observed process is the one with that number of beats."""
    connection.send({"beats": beats, "step": step, "modules": ["torch"]})
    wait_for(lambda: relay.heartbeat_message()["beats"] == observed, 10, f"the beat {observed}")


def test_process_with_steps_is_observed_first_and_the_worker_last():
    supervisor, worker = FakeConnection(), FakeWorker()
    relay = ChildRelay(worker)
    relay.on_message(supervisor, {"tell": 1})
    assert worker.handled == [{"tell": 1}]
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
    assert len(worker.handled) == 1
    for connection in (trainer, helper):
        connection.close()
    wait_for(lambda: relay.heartbeat_message()["beats"] == 1, 10, "the launcher")
    launcher.close()
    relay.wait_until_exited(10)
    assert relay.heartbeat_message()["beats"] == 0


def test_worker_does_not_speak_for_a_silent_process(monkeypatch):
    """So that the supervisor notices a stopped process although its worker runs."""
    relay = ChildRelay(FakeWorker())
    trainer = connect(relay)
    beat(trainer, relay, 1, step=1, observed=1)
    monkeypatch.setattr(process_observer, "_SILENT_S", -1.0)
    assert relay.heartbeat_message() is None
    trainer.close()
    relay.wait_until_exited(10)
    assert relay.heartbeat_message()["beats"] == 0


def test_process_group_may_be_requested_while_torch_is_imported(monkeypatch):
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not has_process_group()


OBSERVED = """
import sys, time
from functools import partial
from hpctrain.runtime.program.process_observer import connect_to_worker, reconnect_or_die
from hpctrain.runtime.supervisor_connection import start_heartbeat

connect = partial(connect_to_worker, sys.argv[1])
start_heartbeat(partial(reconnect_or_die, connect), dict, print)
time.sleep(100)
"""


def test_observed_process_ends_with_its_worker():
    """Slurm would end it with the job step, seconds after the worker was killed."""
    name = f"hpctrain-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as worker:
        worker.bind(f"\0{name}")
        worker.listen()
        worker.settimeout(60)
        observed = subprocess.Popen([sys.executable, "-c", OBSERVED, name])
        connection, _ = worker.accept()
        # Such as after an invalid message.
        connection.close()
        connection, _ = worker.accept()
        assert observed.poll() is None
    connection.close()
    assert observed.wait(60) == -signal.SIGKILL
