import os
import signal
import subprocess
import sys

import pytest
import torch

from hpctrain.checkpoint.tier.rank_record import RankRecord, read_record, read_tensors


@pytest.mark.slow
def test_results_and_tensors_survive_a_kill(tmp_path):
    script = """
import os, signal, sys, torch
from pathlib import Path
from hpctrain.checkpoint.tier.rank_record import RankRecord
mean, count = torch.zeros(3), torch.tensor(0)
record = RankRecord(Path(sys.argv[1]), [mean, count])
for step in range(1, 101):
    mean += 0.5
    count += 1
    record.write(step, {"values": {"loss": step / 3}}, with_tensors=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "record"
    result = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert result.returncode == -signal.SIGKILL
    results = read_record(path)
    assert sorted(results) == list(range(37, 101))
    assert all(result["values"] == {"loss": step / 3} for step, result in results.items())
    for step in (98, 99, 100):
        mean, count = read_tensors(path, step, [torch.zeros(3), torch.tensor(0)])
        assert mean.tolist() == [step / 2] * 3
        assert count.item() == step


def test_a_result_that_is_too_long_is_missing(tmp_path):
    record = RankRecord(tmp_path / "record", [])
    record.write(1, {"values": {"loss": 1.0}}, with_tensors=False)
    record.write(2, {"values": {"x" * 5000: 1.0}}, with_tensors=False)
    assert list(read_record(tmp_path / "record")) == [1]


def test_an_interrupted_write_leaves_no_result(tmp_path):
    """The slot of a step is invalid until its last byte is written."""
    record = RankRecord(tmp_path / "record", [])
    record.write(1, {"values": {"loss": 1.0}}, with_tensors=False)
    with (tmp_path / "record").open("r+b") as file:
        file.seek(4096)
        file.write(bytes(8))
    assert read_record(tmp_path / "record") == {}


def test_a_cleared_record_has_no_results(tmp_path):
    record = RankRecord(tmp_path / "record", [])
    record.write(1, {"values": {"loss": 1.0}}, with_tensors=False)
    record.clear()
    assert read_record(tmp_path / "record") == {}


def test_the_memory_of_a_record_is_reserved(tmp_path):
    """A write to a sparse file on a full file system would end the process with SIGBUS."""
    path = tmp_path / "record"
    RankRecord(path, [torch.zeros(100_000)])
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_missing_record_has_no_results(tmp_path):
    assert read_record(tmp_path / "record") == {}
    RankRecord(tmp_path / "record", []).remove()
    assert os.listdir(tmp_path) == []
