"""Diagnostics of a hanging rank, with a fake flight recorder: without GPUs, there is no NCCL."""

from __future__ import annotations

import json
import sys
import threading
from types import ModuleType

import pytest
from helpers.waiting import wait_for
from torch._C import _distributed_c10d as c10d

from hpctrain.cluster import detect
from hpctrain.rundir import RunDir
from hpctrain.runtime import supervisor_connection
from hpctrain.runtime.program import heartbeat
from hpctrain.runtime.rank_activity import RankActivity
from hpctrain.runtime.supervisor_connection import start_heartbeat
from hpctrain.schema import RankPhase


class FakeConnection:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)


def report(tmp_path) -> tuple[RunDir, list[dict]]:
    connection = FakeConnection()
    heartbeat.report_diagnostics(RunDir(tmp_path), 2, detect({}), connection)
    return RunDir(tmp_path), connection.sent


@pytest.mark.parametrize("name", ["_dump_fr_trace_json", "_dump_nccl_trace_json"])
def test_fake_flight_recorder_is_written(tmp_path, monkeypatch, name):
    for other in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(c10d, other, raising=False)
    record = {"version": "2.10", "entries": [{"profiling_name": "nccl:all_reduce", "state": "started"}]}
    monkeypatch.setattr(c10d, name, lambda: json.dumps(record).encode(), raising=False)
    run, sent = report(tmp_path)
    assert json.loads(run.collectives(2, 0).read_text()) == record
    assert sent[-1] == {"written": True}


@pytest.mark.parametrize("answer", [b'{"entries": []}', RuntimeError("no recorder")])
def test_empty_fake_flight_recorder_is_not_written(tmp_path, monkeypatch, answer):
    def dump() -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", dump, raising=False)
    run, sent = report(tmp_path)
    assert not run.collectives(2, 0).exists()
    assert sent[-1] == {"written": True}


def test_stacks_of_all_threads_and_location_of_the_main_thread(tmp_path, monkeypatch):
    activity = RankActivity()
    activity.set_phase(RankPhase.STEP)
    monkeypatch.setattr(heartbeat, "activity", activity)
    outcome = {}

    def report_from_thread() -> None:
        outcome["run"], outcome["sent"] = report(tmp_path)

    thread = threading.Thread(target=report_from_thread)
    thread.start()
    thread.join()
    stacks = outcome["run"].stacks(2, 0).read_text()
    assert "in report_from_thread" in stacks
    assert "in test_stacks_of_all_threads" in stacks
    first = outcome["sent"][0]["told"]
    assert (first["phase"], first["waits"]) == ("step", False)
    assert "(threading.py:" in first["place"]


class SlowConnection(FakeConnection):
    heartbeat_interval_s = 0.0

    def send(self, message: dict) -> None:
        self.sent.append(heartbeat._has_reported_group.is_set())

    def receive(self, _timeout_s):
        if len(self.sent) == 2:
            raise OSError

    def close(self) -> None:
        pass


def test_group_counts_as_reported_after_the_heartbeat_was_sent(monkeypatch):
    monkeypatch.setattr(heartbeat, "_has_reported_group", threading.Event())
    monkeypatch.setattr(supervisor_connection, "_MAX_CONNECTIONS", 1)
    connection = SlowConnection()
    group = {"group": True}
    start_heartbeat(lambda: connection, lambda: group, lambda *_: None, heartbeat.on_heartbeat_sent)
    wait_for(lambda: len(connection.sent) == 2, 30, "two heartbeats")
    assert connection.sent == [False, True]


def test_pause_is_distinguished_from_native_code_and_from_a_sleeping_machine(monkeypatch):
    def pause(clock_s, monotonic_s, cpu_s, gil_s=0.1):
        monkeypatch.setattr(supervisor_connection, "_times", lambda: (clock_s, monotonic_s, cpu_s, gil_s))
        return supervisor_connection._find_pause((0.0, 0.0, 0.0, 0.0), 1.0)

    assert pause(3601.0, 3601.0, 0.5) == (3600.0, 3600.0)
    assert pause(3601.0, 1.0, 0.5) == (3600.0, 0.0)
    assert pause(21.0, 21.0, 20.0) is None
    assert pause(1.0, 1.0, 0.0) is None
    assert pause(-3600.0, 1.0, 0.0) is None


def test_heartbeats_continue_while_torch_is_imported(monkeypatch):
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert "group" not in heartbeat.heartbeat_message({})
