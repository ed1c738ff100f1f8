"""What a rank tells when the run hangs. The flight recorder is pretended: without GPUs there is no NCCL."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from torch._C import _distributed_c10d as c10d

from hpctrain.cluster import detect
from hpctrain.records.rank_phase import RankPhase
from hpctrain.rundir import RunDir
from hpctrain.runtime import heartbeat
from hpctrain.runtime.rank_activity import RankActivity


class PretendedLine:
    def __init__(self) -> None:
        self.sent: list[dict] = []

    def send(self, message: dict) -> None:
        self.sent.append(message)


def tell(tmp_path) -> tuple[RunDir, list[dict]]:
    line = PretendedLine()
    heartbeat.report_diagnostics(RunDir(tmp_path), 2, detect({}), line)
    return RunDir(tmp_path), line.sent


@pytest.mark.parametrize("name", ["_dump_fr_trace_json", "_dump_nccl_trace_json"])
def test_a_pretended_flight_recorder_is_written_down(tmp_path, monkeypatch, name):
    for other in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        monkeypatch.delattr(c10d, other, raising=False)
    record = {"version": "2.10", "entries": [{"profiling_name": "nccl:all_reduce", "state": "started"}]}
    monkeypatch.setattr(c10d, name, lambda: json.dumps(record).encode(), raising=False)
    run, sent = tell(tmp_path)
    assert json.loads(run.collectives(2, 0).read_text()) == record
    assert sent[-1] == {"written": True}


@pytest.mark.parametrize("answer", [b'{"entries": []}', b'{"version": "2.10"}', RuntimeError("no recorder")])
def test_a_pretended_flight_recorder_that_has_recorded_nothing(tmp_path, monkeypatch, answer):
    def dump() -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(c10d, "_dump_fr_trace_json", dump, raising=False)
    run, sent = tell(tmp_path)
    assert not run.collectives(2, 0).exists()
    assert sent[-1] == {"written": True}


def test_the_stacks_of_all_threads_and_the_place_of_the_main_thread(tmp_path, monkeypatch):
    pulse = RankActivity()
    pulse.set_phase(RankPhase.STEP)
    monkeypatch.setattr(heartbeat, "activity", pulse)
    told = {}

    def beside() -> None:
        told["run"], told["sent"] = tell(tmp_path)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    stacks = told["run"].stacks(2, 0).read_text()
    assert "in beside" in stacks
    assert "in test_the_stacks_of_all_threads" in stacks
    first = told["sent"][0]["told"]
    assert (first["phase"], first["waits"]) == ("step", False)
    assert "(threading.py:" in first["place"]


def test_a_folder_that_cannot_be_written_does_not_keep_a_rank_from_telling(tmp_path):
    (tmp_path / "failures").write_text("in the way")
    _, sent = tell(tmp_path)
    assert [*map(list, sent)] == [["told"], ["written"]]


def test_a_wait_for_other_ranks_is_known_by_its_module():
    frame = sys._getframe()
    assert heartbeat.describe_frame(frame)["waits"] is False
    scope = {"__name__": "torch.distributed.distributed_c10d", "sys": sys}
    exec("def wait():\n    return sys._getframe()\nframe = wait()", scope)
    assert heartbeat.describe_frame(scope["frame"])["waits"] is True
