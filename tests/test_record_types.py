"""The records of a run folder: what is read, and what is skipped."""

import ast
import json
import math
import shutil
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.run_histories import EVENTS, event, step_record
from msgspec import structs

import hpctrain
from hpctrain.record_types import Event, NodeSample, StepRecord, decode, read_records

STEP = {"step": 3, "epoch": 1, "time": 5.0, "attempt": 2, "spent": {"all": 0.5}, "last_step": 9}


def test_all_other_fields_of_a_step_are_its_metrics():
    metrics = {"loss": 0.1 + 0.2, "val_acc": 1, "note": "x", "big": 10**30}
    record = decode(json.dumps(STEP | metrics), StepRecord)
    assert record.metrics == metrics
    assert (record.step, record.epoch, record.spent, record.last_step) == (3, 1, {"all": 0.5}, 9)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, "\ud800"])
def test_values_that_only_python_writes_are_read(loss):
    record = decode(json.dumps(STEP | {"loss": loss}), StepRecord)
    assert repr(record.metrics) == repr({"loss": loss})


def test_fields_of_a_newer_version_are_ignored():
    line = {**EVENTS[1], "newer": {"a": [1]}}
    assert decode(json.dumps(line), Event) == decode(json.dumps(EVENTS[1]), Event)
    assert decode('{"time": 1, "attempt": 0, "kind": "newer"}', Event).kind == "newer"


def test_fields_of_an_event_are_those_of_its_line():
    for line in EVENTS:
        assert decode(json.dumps(line), Event).fields() == {
            name: v for name, v in line.items() if v is not None
        }


@pytest.mark.parametrize(
    "damage",
    [
        {"time": "soon"},
        {"time": math.nan},
        {"time": 10**400},
        {"attempt": -1},
        {"attempt": True},
        {"step": 1.5},
        {"hosts": "n1"},
        {"kind": 5},
        {"seconds": math.nan},
        {"kind": "submitted"},
        {"kind": "finished"},
    ],
)
def test_damaged_events_are_skipped(tmp_path, damage, caplog):
    path = tmp_path / "events.jsonl"
    valid = {"time": 1.0, "attempt": 0, "kind": "started"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (valid, valid | damage, valid)))
    assert list(read_records(path, Event)) == [event("started")] * 2
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    "line", ["", "[1]", "17", '{"step": 1} {"step": 2}', "[" * 5000, '{"step": 1, "x": \xff}']
)
def test_damaged_steps_are_skipped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(f'{line}\n{{"step": 2, "loss": 1.0}}\n{{"step": 3, "lo'.encode("latin-1"))
    assert list(read_records(path, StepRecord)) == [step_record(2, loss=1.0)]


def test_measurements_of_too_many_gpus_are_refused():
    with pytest.raises(ValueError, match="64"):
        decode(json.dumps({"time": 1.0, "gpu_util": [1.0] * 65}), NodeSample)


def test_events_are_written_with_fields_of_the_schema():
    known = {field.encode_name for field in structs.fields(Event)}
    written = set()
    for path in Path(hpctrain.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            function = getattr(node, "func", None)
            name = getattr(function, "attr", getattr(function, "id", None))
            if name in ("log_event", "write_event", "event_record", "write_checkpoint"):
                written |= {keyword.arg for keyword in node.keywords if keyword.arg}
    assert len(written) > 25
    assert written <= known


#: A run of version 0.1 on two ranks. Rank 1 failed in the first attempt, and a validation loss is NaN.
EARLIER_RUN = Path(__file__).parent / "data" / "run"
SCRIPT = """
import torch
import hpctrain

class Model(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

trainer = hpctrain.Trainer(max_steps=8, checkpoint_every=2, memory_copies=False)
trainer.fit(Model(), torch.utils.data.TensorDataset(torch.ones(64, 2)))
"""


@pytest.mark.ranks
def test_run_of_an_earlier_version_is_read_and_resumed(tmp_path):
    shutil.copytree(EARLIER_RUN, tmp_path / "runs" / "a")
    for path in (tmp_path / "runs" / "a").rglob("*.*"):
        if path.suffix in (".yaml", ".jsonl", ".json") and "checkpoints" not in path.parts:
            text = path.read_text().replace("/example/python", sys.executable)
            path.write_text(text.replace("/example", str(tmp_path)))
    (tmp_path / "train.py").write_text(SCRIPT)

    def hpctrain(*args: str):
        command = [sys.executable, "-m", "hpctrain", *args]
        return run_command(command, cwd=tmp_path, timeout=200).stdout

    status = json.loads(hpctrain("status", "runs/a", "--json"))
    assert (status["state"], status["step"], status["loss"]) == ("COMPLETED", 6, 4.534496383712394e-06)
    report = json.loads(hpctrain("report", "runs/a", "--json"))
    assert [attempt["end"] for attempt in report["attempts"]] == ["failure", "completed"]
    assert "ValueError: on purpose" in report["attempts"][0]["cause"]
    assert report["attempts"][1]["startup"]["parts"]["first step"]["max"] > 0
    assert [checkpoint["step"] for checkpoint in report["checkpoints"]] == [2, 4, 6]
    assert report["best"]["value"] == 0.25
    assert "ValueError: on purpose" in hpctrain("logs", "runs/a", "--errors", "--attempt", "0")
    (checkpoint,) = json.loads(hpctrain("checkpoints", "runs/a", "--verify", "--json"))
    assert (checkpoint["step"], checkpoint["problems"]) == (6, [])

    options = (
        "--backend=local",
        "--ntasks-per-node=2",
        "--run-dir=runs/a",
        "--follow",
        "--standby-workers=never",
    )
    hpctrain("submit", *options, "train.py")
    status = json.loads(hpctrain("status", "runs/a", "--json"))
    assert (status["state"], status["step"], status["attempt"]) == ("COMPLETED", 8, 2)
    events = map(json.loads, (tmp_path / "runs" / "a" / "events.jsonl").read_text().splitlines())
    steps = [event["step"] for event in events if event["kind"] == "resumed" and event["attempt"] == 2]
    assert steps == [6]
