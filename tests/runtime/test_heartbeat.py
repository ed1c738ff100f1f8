"""Diagnostics of a hanging rank, with a fake flight recorder: without GPUs, there is no NCCL."""

import json
import signal
import sys
import threading

import pytest
from helpers.commands import run_command
from torch._C import _distributed_c10d as c10d

from hpctrain.cluster import detect
from hpctrain.record_types import RankPhase
from hpctrain.rundir import RunDir
from hpctrain.runtime import supervisor_connection
from hpctrain.runtime.program import heartbeat
from hpctrain.runtime.rank_activity import RankActivity


class FakeConnection:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)


def report(tmp_path) -> tuple[RunDir, list[dict]]:
    connection = FakeConnection()
    heartbeat.report_diagnostics(RunDir(tmp_path), 2, detect({}), connection)
    return RunDir(tmp_path), connection.sent


RECORD = json.dumps({"entries": [{"profiling_name": "nccl:all_reduce", "state": "started"}]}).encode()


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("_dump_fr_trace_json", RECORD),
        ("_dump_nccl_trace_json", RECORD),
        ("_dump_fr_trace_json", b'{"entries": []}'),
    ],
)
def test_fake_flight_recorder_is_written_unless_it_is_empty(tmp_path, monkeypatch, name, record):
    for other in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(c10d, other, raising=False)
    monkeypatch.setattr(c10d, name, lambda: record, raising=False)
    run, sent = report(tmp_path)
    path = run.collectives(2, 0)
    assert (path.read_bytes() if path.exists() else None) == (record if record == RECORD else None)
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


def test_pause_is_distinguished_from_native_code_and_from_a_sleeping_machine(monkeypatch):
    def pause(clock_s, monotonic_s, cpu_s, gil_s=0.1):
        monkeypatch.setattr(supervisor_connection, "_times", lambda: (clock_s, monotonic_s, cpu_s, gil_s))
        return supervisor_connection._find_pause((0.0, 0.0, 0.0, 0.0), 1.0)

    assert pause(3601.0, 3601.0, 0.5) == (3600.0, 3600.0)
    assert pause(3601.0, 1.0, 0.5) == (3600.0, 0.0)
    assert pause(21.0, 21.0, 20.0) is None
    assert pause(1.0, 1.0, 0.0) is None
    assert pause(-3600.0, 1.0, 0.0) is None


#: Libraries whose import changes the environment in the same way in each process.
IMPORTS = """
import importlib, os, sys
before = dict(os.environ)
for name in sys.argv[1:]:
    importlib.import_module(name)
from hpctrain.runtime.program.heartbeat import changed_variables
print(changed_variables(before, os.environ))
"""


@pytest.mark.extended
def test_imports_of_libraries_do_not_prevent_standby_workers():
    command = [sys.executable, "-c", IMPORTS, "lightning.pytorch", "accelerate", "transformers"]
    assert run_command(command, timeout=200).stdout == "[]\n"


def test_rank_gets_the_stop_signal_that_its_script_handles(tmp_path):
    """The default action of SIGUSR2 would kill a script that only handles SIGTERM."""
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        message = {"stop_signal": "SIGUSR2"}
        heartbeat.on_message(RunDir(tmp_path), 0, detect({}), FakeConnection(), message)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM]
