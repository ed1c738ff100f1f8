"""When a training saves: by step, by what pays off, before it is ended; and what it takes along."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import signal
import threading
import time

import pytest
import torch
from helpers import REPOSITORY
from helpers.waiting import wait_for

import hpctrain
from hpctrain.buffered_writer import BufferedLineWriter
from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.interval import InterruptionHistory, checkpoint_interval_s, optimal_interval_s
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError, UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.optim.optimizer_setup import ignored_hyperparameters
from hpctrain.training.saving import checkpoint_schedule as cadence_module
from hpctrain.training.saving.checkpoint_schedule import CheckpointSchedule
from hpctrain.training.saving.stop_deadline import FinalSavePlan, StopDeadline, plan_final_save

DAY = 86_400.0


class Line(hpctrain.Module):
    """Counts its own steps in what it keeps beside its weights; stops at a step when told."""

    def __init__(self, at=None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(2, 1)
        self.at, self.rate = at or {}, 0.1
        self.seen = {"steps": 0, "mean": torch.zeros(2), "words": ("a", None, 0.1)}

    def training_step(self, batch, batch_idx):
        self.seen["steps"] += 1
        self.seen["mean"] = self.seen["mean"] + batch.mean(0)
        if action := self.at.get(self.seen["steps"]):
            action()
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return {
            "val_loss": self.layer(batch).pow(2).mean(),
            "val_up": torch.tensor(float(self.seen["steps"])),
        }

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["seen"]


def fit(run_dir, max_steps=6, module=None, **settings) -> Line:
    module = module or Line()
    trainer = hpctrain.Trainer(
        max_steps=max_steps, global_batch_size=2, run_dir=run_dir, seed=3,
        **{"checkpoint_every": 2, "validate_every": None, **settings},
    )  # fmt: skip
    data = list(torch.randn(8, 2, generator=torch.Generator().manual_seed(5)))
    trainer.fit(module, data, data if trainer.validate_every else None)
    return module


def events(run_dir, kind=None):
    return [event for event in RunDir(run_dir).read_events() if kind in (None, event["kind"])]


def steps(run_dir):
    return sorted(committed_steps(RunDir(run_dir).checkpoints))


# --- what a checkpoint keeps ---------------------------------------------------------------------------


def test_what_the_module_keeps_of_its_own_comes_back(tmp_path):
    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "parts", 3)
    parts = fit(tmp_path / "parts", 6)
    assert parts.seen["steps"] == whole.seen["steps"] == 6
    assert torch.equal(parts.seen["mean"], whole.seen["mean"])
    assert parts.seen["words"] == ("a", None, 0.1)


def test_what_cannot_be_kept_is_named_by_its_path_before_anything_is_trained(tmp_path):
    module = Line()
    module.seen["deep"] = [{"lock": threading.Lock()}]
    with pytest.raises(CheckpointError, match=r"state/user/seen/deep/0/lock is a _thread.lock"):
        fit(tmp_path, module=module)
    assert not RunDir(tmp_path).metrics.exists()


class Several(Line):
    """Two optimizers that share out the parameters, and a schedule each."""

    def configure_optimizers(self):
        optimizers = [torch.optim.AdamW([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], 0.1)]
        return optimizers, [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
            for optimizer in optimizers
        ]


def test_several_optimizers_and_schedulers_are_continued(tmp_path):
    whole = fit(tmp_path / "whole", 6, Several())
    fit(tmp_path / "parts", 3, Several())
    parts = fit(tmp_path / "parts", 6, Several())
    assert torch.equal(parts.layer.weight, whole.layer.weight)
    assert torch.equal(parts.layer.bias, whole.layer.bias)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1)] * 2, "assigns layer.weight to optimizer 0"),
        (lambda m: ([], []), "returned ([], [])"),
        (
            lambda m: {
                "optimizer": (o := torch.optim.SGD(m.parameters(), 0.1)),
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.StepLR(o, 2),
                    "interval": "epoch",
                },
            },
            "interval='epoch'",
        ),
    ],
)
def test_what_would_train_otherwise_than_expected_is_refused(tmp_path, answer, words):
    module = Line()
    optimizer = answer(module)
    if isinstance(optimizer, list):
        optimizer[1] = torch.optim.Adam(module.parameters())
    module.configure_optimizers = lambda: optimizer
    with pytest.raises(UserError, match=re.escape(words)):
        fit(tmp_path, module=module)


def test_the_state_is_that_of_the_step_however_late_it_is_written(tmp_path, monkeypatch):
    """The disk takes no byte before training is a step further."""
    reached = threading.Event()
    from hpctrain.checkpoint import saver

    commit = saver.write_and_commit

    def late(site, step, own):
        assert step == 6 or reached.wait(20)
        return commit(site, step, own)

    monkeypatch.setattr(saver, "write_and_commit", late)
    module = Line(at={5: reached.set})
    fit(tmp_path / "late", 6, module, checkpoint_every=4)
    monkeypatch.undo()
    fit(tmp_path / "prompt", 6, checkpoint_every=4, checkpoint_async=False)
    from hpctrain.checkpoint.convert.export_checkpoint import load_on_cpu

    for step in (4, 6):
        late_one, prompt = (
            load_on_cpu(RunDir(tmp_path / name).checkpoint(step)).state for name in ("late", "prompt")
        )
        assert late_one["user"]["seen"]["steps"] == step
        assert torch.equal(late_one["user"]["seen"]["mean"], prompt["user"]["seen"]["mean"])
        assert torch.equal(late_one["module"]["layer.weight"], prompt["module"]["layer.weight"])


# --- which stay ----------------------------------------------------------------------------------------


def test_retention_by_newest_by_step_and_by_score(tmp_path):
    fit(
        tmp_path,
        12,
        checkpoint_every=1,
        keep_last=2,
        keep_every=5,
        keep_best=1,
        monitor="val_up",
        mode="min",
        validate_every=3,
    )
    assert steps(tmp_path) == [3, 5, 10, 11, 12]
    listed, rule = list_checkpoints(RunDir(tmp_path), verify=True)
    assert (rule.metric, rule.mode) == ("val_up", "min")
    assert [one.step for one in listed if one.best] == [3]
    assert [one.step for one in listed if one.newest] == [12]


def test_a_metric_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(UserError, match=r"monitor is 'accuracy'.*'loss', 'val_loss', 'val_up'"):
        fit(tmp_path, keep_best=1, monitor="accuracy", validate_every=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_every": 0}, "keep_every is 0"),
        ({"keep_best": -1}, "keep_best is -1"),
        ({"mode": "low"}, "mode is 'low'; it must be 'min' or 'max'"),
    ],
)
def test_rules_out_of_range_are_refused(settings, words):
    with pytest.raises(UserError, match=re.escape(words)):
        hpctrain.Trainer(max_steps=1, **settings)


def test_a_fast_folder_takes_the_saves_first_and_is_clean_at_the_end(tmp_path):
    fast = tmp_path / "fast"
    fast.mkdir()
    fit(tmp_path / "run", 6, local_checkpoints=fast)
    saved = [(event["step"], event["tier"]) for event in events(tmp_path / "run", "checkpoint")]
    assert saved[0] == (2, "local")
    assert (6, "shared") in saved
    assert steps(tmp_path / "run")[-1] == 6
    assert list(fast.iterdir()) == []


def test_a_fast_folder_that_is_not_there_is_not_made_and_the_saves_go_to_the_run_folder(tmp_path, capsys):
    fit(tmp_path / "run", 4, local_checkpoints=tmp_path / "nope" / "deep")
    assert "no such folder on this node" in capsys.readouterr().out
    assert not (tmp_path / "nope").exists()
    assert steps(tmp_path / "run")[-1] == 4


def test_the_best_by_a_validation_that_there_is_not_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"keep_best=2 .*monitor='val_loss'.* no validation set"):
        fit(tmp_path, keep_best=2)


def test_a_changed_learning_rate_is_not_ignored_in_silence(tmp_path, capsys):
    fit(tmp_path, 2)
    capsys.readouterr()
    module = Line()
    module.rate = 0.5
    fit(tmp_path, 4, module)
    said = capsys.readouterr().out
    assert re.search(
        r"lr stays [\d.]+, the value in the checkpoint, although the script now sets 0.5\.", said
    )
    fit(tmp_path, 6)
    assert "the value in the checkpoint" not in capsys.readouterr().out


def test_a_schedule_is_no_change_of_the_learning_rate():
    parameter = torch.nn.Parameter(torch.ones(1))

    def make(rate, **more):
        optimizer = torch.optim.SGD([parameter], lr=rate, **more)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)

    old, schedule = make(0.1)
    old.step()
    schedule.step()
    assert old.param_groups[0]["lr"] < 0.1
    state = old.state_dict()
    assert ignored_hyperparameters([make(0.1)[0]], [state]) == []
    (said,) = ignored_hyperparameters([make(0.2)[0]], [state])
    assert said.startswith("lr stays 0.1, the value in the checkpoint, although the script now sets 0.2.")
    (said,) = ignored_hyperparameters([make(0.1, momentum=0.9)[0]], [state])
    assert said.startswith("momentum stays 0")
    assert ignored_hyperparameters([old], None) == []


def test_a_run_of_whose_checkpoints_none_is_whole_is_not_trained_again_unasked(tmp_path):
    fit(tmp_path, 4)
    for step in steps(tmp_path):
        (RunDir(tmp_path).checkpoint(step) / "manifest.json").write_text("torn")
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"No checkpoint in .* is complete.*step-0+4\.broken-0.*To start over"
        ):
            fit(tmp_path, 6)
    for path in RunDir(tmp_path).checkpoints.glob("*.broken-0"):
        shutil.rmtree(path)
    fit(tmp_path, 6)
    assert steps(tmp_path)[-1] == 6


# --- what goes wrong with a disk -----------------------------------------------------------------------


def test_a_save_that_fails_is_said_and_tried_again_later_and_not_at_each_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cadence_module, "_MIN_BACKOFF_S", 0.05)
    run = RunDir(tmp_path)
    run.checkpoints.write_text("in the way")
    tried = []
    begin = CheckpointStore.async_save
    monkeypatch.setattr(
        CheckpointStore,
        "async_save",
        lambda self, step, *a, **k: (tried.append(step), begin(self, step, *a, **k)),
    )
    module = Line(at={n: lambda: time.sleep(0.02) for n in range(1, 60)} | {30: run.checkpoints.unlink})
    fit(tmp_path, 60, module, checkpoint_every=1)
    failures = events(tmp_path, "failure")
    assert 1 <= len(failures) < 10
    assert "step 1 " in failures[0]["cause"]
    assert "Training continues" in capsys.readouterr().out
    assert "rank" not in failures[0], "a failed save is no failed rank"
    assert len([step for step in tried if step < 30]) == len(failures), "in the pause nothing is tried"
    assert steps(tmp_path)[-1] == 60
    assert len(events(tmp_path, "checkpoint")) > 3


def test_lines_wait_until_they_can_be_written(tmp_path):
    said: list[str] = []
    folder = tmp_path / "run"
    lines = BufferedLineWriter(folder / "metrics.jsonl", said.append)
    for i in range(3):
        lines.append({"step": i})
    assert len(said) == 1
    assert "No such file or directory" in said[0]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"torn": ')
    lines.append({"step": 3})
    lines.flush()
    assert [record["step"] for record in read_json_lines(folder / "metrics.jsonl")] == [0, 1, 2, 3]
    assert "is writable again" in said[1]


# --- when ----------------------------------------------------------------------------------------------


def test_the_interval_is_young_and_dalys():
    # By Young's √(2 · 60 s · 1 day) = 3220 s; Daly's terms of higher order take 40 s of it off.
    assert optimal_interval_s(60, DAY) == pytest.approx(
        3220 * (1 + 0.01863 / 3 + 0.01863**2 / 9) - 60, rel=1e-3
    )
    assert optimal_interval_s(3 * DAY, DAY) == DAY


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(1.0, 600.0), (60.0, DAY), (120.0, 3600.0)])
def test_the_interval_is_about_the_one_that_loses_least_in_a_simulation(save_s, mtbf_s):
    def overhead(interval_s: float) -> float:
        """Daly's exact expectation of wall time over work, restarts taken for free."""
        return mtbf_s * math.expm1((interval_s + save_s) / mtbf_s) / interval_s

    best = optimal_interval_s(save_s, mtbf_s)
    least = min(overhead(best * factor / 100) for factor in range(20, 500))
    assert overhead(best) <= least * 1.001


def test_the_interval_is_not_shorter_than_writing_takes_or_anybody_needs():
    assert checkpoint_interval_s(1e-6, 0.0, 10.0) == 10.0
    assert checkpoint_interval_s(0.1, 500.0, DAY) == 500.0


def test_the_documentations_examples_of_the_interval():
    page = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    row = r"\| (\d+) \| ([\d.]+) s \| (none|(\d+) days, (\d+) interruptions) \| (\d+) s \|"
    rows = re.findall(row, page)
    assert len(rows) == 4
    for nodes, save_s, _, days, count, said_s in rows:
        history = InterruptionHistory(int(count or 0), int(nodes) * int(days or 0) * DAY)
        mtbf_s = history.node_mtbf_s(DAY) / int(nodes)
        assert round(checkpoint_interval_s(float(save_s), 0.0, mtbf_s)) == int(said_s)


def attempt(begin, end, *, nodes=2, saved=None, state=None):
    yield {"kind": "started", "time": begin, "nodes": nodes}
    if saved is not None:
        yield {"kind": "signal", "time": end, "saved": saved}
    if state is not None:
        yield {"kind": "finished", "time": end, "state": state}
    yield {"kind": "checkpoint", "time": end, "step": 1}


def test_interruptions_are_counted_from_the_record_of_the_run():
    history = [
        *attempt(0.0, 100.0),  # killed
        *attempt(150.0, 250.0, saved=True),  # preempted, and saved
        *attempt(300.0, 400.0, saved=False),  # preempted, and did not
        *attempt(500.0, 600.0, nodes=4),  # this one
    ]
    assert InterruptionHistory.from_events(history) == InterruptionHistory(2, 2 * 300.0 + 4 * 100.0)
    assert InterruptionHistory.from_events([]).node_mtbf_s(DAY) == DAY
    assert InterruptionHistory(3, 3 * DAY).node_mtbf_s(DAY) == DAY
    assert InterruptionHistory(0, 9 * DAY).node_mtbf_s(DAY) == 10 * DAY


def test_the_estimate_comes_to_what_really_happens():
    generator, true_mtbf_s, node_seconds, count = random.Random(1), 5_000.0, 0.0, 0
    while count < 2000:
        node_seconds += generator.expovariate(1 / true_mtbf_s)
        count += 1
    assert InterruptionHistory(count, node_seconds).node_mtbf_s(DAY) == pytest.approx(true_mtbf_s, rel=0.1)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_auto_saves_by_the_clock_and_sooner_where_more_nodes_can_fail():
    clock = Clock()
    one, many = (CheckpointSchedule("auto", num_nodes=n, clock=clock) for n in (1, 100))
    for cadence in (one, many):
        cadence.on_save_started(1.0)
        assert not cadence.is_due_by_time()
        cadence.on_save_committed(5.0)
    assert 8 < one.interval_s / many.interval_s < 11
    clock.now = many.interval_s
    assert many.is_due_by_time()
    assert not one.is_due_by_time()
    many.on_save_started(1.0)
    clock.now = 1e6
    assert not many.is_due_by_time(), "one is in flight"


def test_a_failure_is_followed_by_pauses_that_grow_and_a_success_by_none():
    clock = Clock()
    cadence = CheckpointSchedule(1000, clock=clock)
    pauses = []
    for _ in range(10):
        cadence.on_save_started(0.0)
        cadence.on_save_failed()
        begin = clock.now
        assert not cadence.is_due_by_time()
        while cadence.in_backoff:
            clock.now += 1.0
        pauses.append(clock.now - begin)
        assert cadence.is_due_by_time(), "tried again before the next step that is due"
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    cadence.on_save_started(0.0)
    cadence.on_save_committed(1.0)
    assert not cadence.is_due_by_time()
    assert not cadence.in_backoff


def test_what_the_site_knows_of_interruptions_is_heard(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_NODE_MTBF_S", "often")
    with pytest.raises(UserError, match="HPCTRAIN_NODE_MTBF_S is 'often'"):
        fit(tmp_path)


# --- the last save -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_s", "write_s", "in_flight_s", "plan"),
    [
        (math.inf, None, None, FinalSavePlan.AFTER_PENDING_SAVE),
        (1.0, None, None, FinalSavePlan.AFTER_PENDING_SAVE),  # nothing is known against it
        (30.0, 10.0, None, FinalSavePlan.AFTER_PENDING_SAVE),
        (30.0, 10.0, 9.0, FinalSavePlan.AFTER_PENDING_SAVE),
        (20.0, 10.0, 1.0, FinalSavePlan.REPLACE_PENDING_SAVE),
        (8.0, 10.0, 9.0, FinalSavePlan.PENDING_SAVE_ONLY),
        (8.0, 10.0, 1.0, FinalSavePlan.NONE),
        (13.0, 10.0, None, FinalSavePlan.NONE),
        (-1.0, 1.0, None, FinalSavePlan.NONE),
    ],
)
def test_only_what_fits_into_the_grace_is_begun(left_s, write_s, in_flight_s, plan):
    assert plan_final_save(left_s, write_s, in_flight_s) is plan


def test_what_is_left_of_the_grace_counts_from_the_signal():
    flag = StopFlag()
    grace = StopDeadline({"HPCTRAIN_STOP_GRACE": "SIGTERM=30,SIGUSR2=120"}, flag)
    assert grace.left_s() == math.inf
    flag.record(15, None)
    assert 29 < grace.left_s() <= 30
    assert grace.left_s(for_requeue=True) == math.inf
    assert (
        299
        < StopDeadline({"HPCTRAIN_STOP_GRACE": "SIGTERM=30,requeue=300"}, flag).left_s(for_requeue=True)
        <= 300
    )
    assert StopDeadline({}, flag).left_s() == math.inf
    with pytest.raises(UserError, match="HPCTRAIN_STOP_GRACE is 'soon'"):
        StopDeadline({"HPCTRAIN_STOP_GRACE": "soon"}, flag)


@pytest.mark.parametrize(("grace", "saved"), [("SIGTERM=60", True), ("SIGTERM=1", False)])
def test_a_stop_saves_if_that_fits_and_else_says_that_the_last_one_stands(
    tmp_path, monkeypatch, capsys, grace, saved
):
    monkeypatch.setenv("HPCTRAIN_STOP_GRACE", grace)
    run = RunDir(tmp_path)

    def stop_once_one_is_saved():
        wait_for(lambda: run.checkpoint(2).is_dir(), 10, "the checkpoint of step 2")
        time.sleep(0.1)  # until it is told of
        signal.raise_signal(signal.SIGTERM)

    module = Line(at={3: stop_once_one_is_saved})
    with pytest.raises(SystemExit) as leaving:
        fit(tmp_path, 20, module, checkpoint_every=2)
    assert leaving.value.code == 75
    (stop,) = events(tmp_path, "signal")
    assert stop["saved"] is saved
    assert (stop["step"] in steps(tmp_path)) is saved
    out = capsys.readouterr().out
    assert ("its checkpoint is saved" in out) is saved
    assert ("Earlier checkpoints are intact" in out) is not saved
    assert steps(tmp_path), "a checkpoint stands"
    assert fit(tmp_path, 20).seen["steps"] == 20


def test_an_error_while_a_save_is_written_ends_the_training_at_once(tmp_path, monkeypatch):
    from hpctrain.checkpoint import saver

    stuck = threading.Event()
    monkeypatch.setattr(saver, "write_and_commit", lambda *_: stuck.wait(20))

    def crash():
        raise ZeroDivisionError

    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, 6, Line(at={3: crash}))
    assert time.monotonic() - begun < 10
    stuck.set()


def test_validation_and_metrics_stand_in_order_beside_saves_in_the_background(tmp_path):
    fit(tmp_path, 8, validate_every=2, checkpoint_every=1)
    records = list(read_json_lines(RunDir(tmp_path).metrics))
    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["step"] for record in records if "val_loss" in record] == [2, 4, 6, 8]
    saved = [event["step"] for event in events(tmp_path, "checkpoint")]
    assert saved == list(range(1, 9))
    for event in events(tmp_path, "checkpoint"):
        assert json.dumps(event)
        assert event["seconds"] > 0
