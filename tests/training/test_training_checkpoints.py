"""Checkpoints of a training: schedule, content, final save and retention."""

import math
import os
import random
import re
import shutil
import signal
import threading
import time

import numpy
import pytest
import torch
from helpers.run_histories import event
from helpers.waiting import slowness, wait_for

import hpctrain
from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.interval import InterruptionHistory, optimal_interval_s
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.listing import list_checkpoints, list_quarantined
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.errors import CheckpointError, UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import VERIFIED_STEP_VARIABLE, RunDir
from hpctrain.runtime.stopping.signal_recorder import read_stop_grace
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.base import rng
from hpctrain.training.saving import training_checkpoints
from hpctrain.training.saving.checkpoint_schedule import (
    CheckpointSchedule,
    FinalSavePlan,
    plan_final_save,
    seconds_until_kill,
)

DAY = 86_400.0


class Line(hpctrain.Module):
    """Counts its own steps in extra state; runs actions at given steps."""

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
    return [event for event in read_json_lines(RunDir(run_dir).events) if kind in (None, event["kind"])]


def steps(run_dir):
    return sorted(committed_steps(RunDir(run_dir).checkpoints))


def test_unsupported_state_is_refused_with_its_path_before_training(tmp_path):
    module = Line()
    module.seen["deep"] = [{"lock": threading.Lock()}]
    with pytest.raises(CheckpointError, match=r"state/user/seen/deep/0/lock has type _thread\.lock"):
        fit(tmp_path, module=module)
    assert not RunDir(tmp_path).metrics.exists()


@pytest.mark.parametrize(
    ("make_optimizers", "message"),
    [
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1)] * 2, "assigns layer.weight to optimizers 0 and 1"),
        (lambda m: ([], []), "returned ([], [])"),
        (
            lambda m: {
                "optimizer": (o := torch.optim.SGD(m.parameters(), 0.1)),
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2), "interval": "epoch"},
            },
            "interval='epoch'",
        ),
    ],
)
def test_unsupported_optimizer_configuration_is_refused(tmp_path, make_optimizers, message):
    module = Line()
    optimizer = make_optimizers(module)
    if isinstance(optimizer, list):
        optimizer[1] = torch.optim.Adam(module.parameters())
    module.configure_optimizers = lambda: optimizer
    with pytest.raises(UserError, match=re.escape(message)):
        fit(tmp_path, module=module)


def test_retention_by_newest_step_and_score(tmp_path):
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
    assert [entry.step for entry in listed if entry.best] == [3]
    assert [entry.step for entry in listed if entry.newest] == [12]


def test_scores_of_another_metric_do_not_count(tmp_path):
    fit(tmp_path, 6, validate_every=2, keep_last=1, keep_best=1, monitor="val_loss", mode="min")
    fit(tmp_path, 12, validate_every=2, keep_last=1, keep_best=1, monitor="val_up", mode="min")
    assert steps(tmp_path) == [8, 12]
    listed, _ = list_checkpoints(RunDir(tmp_path))
    assert [entry.step for entry in listed if entry.best] == [8]


def test_unknown_monitor_metric_is_reported_with_available_ones(tmp_path):
    with pytest.raises(UserError, match=r"monitor is 'accuracy'.*'loss', 'val_loss', 'val_up'"):
        fit(tmp_path, keep_best=1, monitor="accuracy", validate_every=2)


def test_keep_best_without_validation_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"keep_best=2 .*monitor='val_loss'.* no validation set"):
        fit(tmp_path, keep_best=2)


def test_run_with_only_corrupt_checkpoints_is_not_restarted_silently(tmp_path):
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


def test_training_starts_over_if_its_only_checkpoint_was_lost_with_a_node(tmp_path, monkeypatch, capsys):
    tier, run = tmp_path / "fast", RunDir(tmp_path / "run")
    tier.mkdir()

    def fail(self, step):
        raise CheckpointError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(LocalTier, "_copy_shares", fail)
        store = CheckpointStore(run.checkpoints, second_tier=tier)
        store.async_save(2, {"x": torch.zeros(1)}, {})
        store.close()
    (lost,) = tier.glob("*/step-00000002/state.json")
    lost.unlink()
    fit(run.path, 4, local_checkpoints=tier)
    assert "step-00000002.broken-0" in capsys.readouterr().out
    assert steps(run.path) == [2, 4]


def test_unverified_checkpoints_are_set_aside_and_reported(tmp_path, monkeypatch, capsys):
    fit(tmp_path, 6, checkpoint_every=2)
    monkeypatch.setenv(VERIFIED_STEP_VARIABLE, "3")
    fit(tmp_path, 8, checkpoint_every=2)
    aside = ["step-00000004.unverified-0", "step-00000006.unverified-0"]
    assert sorted(path.name for path in list_quarantined(RunDir(tmp_path))) == aside
    assert steps(tmp_path) == [4, 6, 8]
    (resumed,) = events(tmp_path, "resumed")
    assert resumed["step"] == 2
    output = capsys.readouterr().out
    for number, name in zip((4, 6), aside, strict=True):
        folder = RunDir(tmp_path).checkpoint(number)
        sentence = (
            f"{folder} was saved after step 3, the last verified step. The checkpoint was renamed to {name}."
        )
        assert sentence in resumed["broken"]
        assert f"hpctrain: {sentence}" in output


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(1.0, 600.0), (60.0, DAY), (120.0, 3600.0)])
def test_optimal_interval_minimizes_the_expected_overhead(save_s, mtbf_s):
    def overhead(interval_s: float) -> float:
        """Return Daly's exact expectation of wall time over work, without restart times."""
        return mtbf_s * math.expm1((interval_s + save_s) / mtbf_s) / interval_s

    best = optimal_interval_s(save_s, mtbf_s)
    least = min(overhead(best * factor / 100) for factor in range(20, 500))
    assert overhead(best) <= least * 1.001


def attempt(begin, end, *, nodes=2, saved=None, state=None):
    yield event("started", time=begin, nodes=nodes)
    if saved is not None:
        yield event("signal", time=end, saved=saved)
    if state is not None:
        yield event("finished", time=end, state=state)
    yield event("checkpoint", time=end, step=1)


def test_interruptions_are_counted_from_events():
    history = [
        *attempt(0.0, 100.0),  # killed
        *attempt(150.0, 250.0, saved=True),  # preempted, and saved
        *attempt(300.0, 400.0, saved=False),  # preempted, and not saved
        *attempt(500.0, 600.0, nodes=4),  # this one
    ]
    assert InterruptionHistory.from_events(history) == InterruptionHistory(2, 2 * 300.0 + 4 * 100.0)
    assert InterruptionHistory.from_events([]).node_mtbf_s(DAY) == DAY
    assert InterruptionHistory(3, 3 * DAY).node_mtbf_s(DAY) == DAY
    assert InterruptionHistory(0, 9 * DAY).node_mtbf_s(DAY) == 10 * DAY


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_auto_interval_is_shorter_with_more_nodes():
    clock = Clock()
    single_node, many = (CheckpointSchedule("auto", num_nodes=n, clock=clock) for n in (1, 100))
    for schedule in (single_node, many):
        schedule.on_save_started(1.0)
        assert not schedule.is_due_by_time()
        schedule.on_save_committed(5.0)
    assert 8 < single_node.interval_s / many.interval_s < 11
    clock.now = many.interval_s
    assert many.is_due_by_time()
    assert not single_node.is_due_by_time()
    many.on_save_started(1.0)
    clock.now = 1e6
    assert not many.is_due_by_time(), "one is in flight"


def test_failed_saves_are_followed_by_growing_pauses():
    clock = Clock()
    schedule = CheckpointSchedule(1000, clock=clock)
    pauses = []
    for _ in range(10):
        schedule.on_save_started(0.0)
        schedule.on_save_failed()
        begin = clock.now
        assert not schedule.is_due_by_time()
        while schedule.in_backoff:
            clock.now += 1.0
        pauses.append(clock.now - begin)
        assert schedule.is_due_by_time(), "tried again before the next step that is due"
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    for _ in range(1100):  # more than a week
        schedule.on_save_failed()
    schedule.on_save_started(0.0)
    schedule.on_save_committed(1.0)
    assert schedule.in_backoff, "only the fast folder has this checkpoint"
    schedule.on_reached_run_folder()
    assert not schedule.is_due_by_time()
    assert not schedule.in_backoff


def test_invalid_node_mtbf_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_NODE_MTBF_S", "often")
    with pytest.raises(UserError, match="HPCTRAIN_NODE_MTBF_S is 'often'"):
        fit(tmp_path)


@pytest.mark.parametrize(
    ("left_s", "write_s", "in_flight_s", "plan"),
    [
        (1.0, None, None, FinalSavePlan.AFTER_PENDING_SAVE),  # no estimate speaks against it
        (30.0, 10.0, 9.0, FinalSavePlan.AFTER_PENDING_SAVE),
        (20.0, 10.0, 1.0, FinalSavePlan.REPLACE_PENDING_SAVE),
        (8.0, 10.0, 9.0, FinalSavePlan.PENDING_SAVE_ONLY),
        (8.0, 10.0, 1.0, FinalSavePlan.NONE),
        (13.0, 10.0, None, FinalSavePlan.NONE),
    ],
)
def test_final_save_must_fit_into_the_grace_period(left_s, write_s, in_flight_s, plan):
    assert plan_final_save(left_s, write_s, in_flight_s) is plan


def test_remaining_grace_counts_from_the_signal(tmp_path):
    flag, run = StopFlag(), RunDir(tmp_path)
    grace = read_stop_grace({"HPCTRAIN_STOP_GRACE": "SIGTERM=30,SIGUSR2=120,requeue=300"})
    assert seconds_until_kill(flag, grace, None) == math.inf
    flag.record(15, None)
    assert 29 < seconds_until_kill(flag, grace, None) <= 30
    assert 299 < seconds_until_kill(flag, grace, "requeue") <= 300
    assert seconds_until_kill(flag, read_stop_grace({}), None) == math.inf
    # Slurm ends a cancelled job after KillWait. Early stopping leaves its own reason.
    for reason, key in ((None, None), ("", "cancel"), ("worse than the others", None)):
        if reason is not None:
            run.cancel_request.write_text(reason)
        assert run.grace_key(0) == key
    for text, left_s in (("SIGTERM=30", 30), ("SIGTERM=30,cancel=5", 5)):
        grace = read_stop_grace({"HPCTRAIN_STOP_GRACE": text})
        assert left_s - 1 < seconds_until_kill(flag, grace, "cancel") <= left_s
    with pytest.raises(UserError, match="HPCTRAIN_STOP_GRACE is 'soon'"):
        read_stop_grace({"HPCTRAIN_STOP_GRACE": "soon"})


@pytest.mark.parametrize(("grace", "saved"), [("SIGTERM=60", True), ("SIGTERM=1", False)])
def test_stop_saves_if_there_is_time_and_reports_otherwise(tmp_path, monkeypatch, capsys, grace, saved):
    monkeypatch.setenv("HPCTRAIN_STOP_GRACE", grace)
    run = RunDir(tmp_path)

    def stop_after_first_checkpoint():
        wait_for(lambda: run.checkpoint(2).is_dir(), 10, "the checkpoint of step 2")
        time.sleep(0.1)  # until it is reported
        signal.raise_signal(signal.SIGTERM)

    module = Line(at={3: stop_after_first_checkpoint})
    with pytest.raises(SystemExit) as exit_info:
        fit(tmp_path, 20, module, checkpoint_every=2)
    assert exit_info.value.code == 75
    (stop,) = events(tmp_path, "signal")
    assert stop["saved"] is saved
    assert (stop["step"] in steps(tmp_path)) is saved
    out = capsys.readouterr().out
    assert ("the checkpoint of this step is saved" in out) is saved
    assert ("Earlier checkpoints are intact" in out) is not saved
    assert steps(tmp_path), "a checkpoint stands"
    assert fit(tmp_path, 20).seen["steps"] == 20


def test_error_during_a_save_ends_the_training_at_once(tmp_path, monkeypatch):
    from hpctrain.checkpoint import store

    stuck = threading.Event()
    monkeypatch.setattr(store, "write_and_commit", lambda *_: stuck.wait(100))

    def crash():
        raise ZeroDivisionError

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, 6, Line(at={3: crash}))
    assert time.monotonic() - start < 60 * slowness()
    stuck.set()


class AveragedWeights(hpctrain.Module):
    """The optimizer has float32 states for bfloat16 parameters, and a large integer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.ASGD(self.parameters(), lr=0.1, lambd=0.01)
        optimizer.register_step_post_hook(self._count)
        return optimizer

    def _count(self, optimizer, _args, _options):
        state = optimizer.state[self.layer.weight]
        state["count"] = state.get("count", torch.tensor(1000)) + 1


@pytest.mark.slow
def test_optimizer_states_keep_their_type(tmp_path):
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    def fit(run: str, max_steps: int) -> tuple[AveragedWeights, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module, seen = AveragedWeights(), []
        configure = module.configure_optimizers
        module.configure_optimizers = lambda: seen.append(configure()) or seen[0]
        settings = {"global_batch_size": 4, "precision": "bf16-true", "seed": 1, "run_dir": tmp_path / run}
        hpctrain.Trainer(max_steps=max_steps, **settings).fit(module, data)
        return module, seen[0]

    whole, optimizer = fit("whole", 6)
    fit("resumed", 3)
    resumed, other = fit("resumed", 6)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    own, saved = (each.state[module.layer.weight] for each, module in ((other, resumed), (optimizer, whole)))
    assert own.keys() == saved.keys()
    for name, value in saved.items():
        assert own[name].dtype == value.dtype, name
        assert torch.equal(own[name], value), name


def test_random_state_has_a_constant_shape():
    """Otherwise, the layout of a checkpoint would change with every save."""
    shapes = set()
    for seed in range(5):
        rng.seed_all(seed * 10**5)
        for _ in range(seed):
            random.gauss(0, 1)
            numpy.random.standard_normal()
        shapes.add(str({name: (part.shape, part.dtype) for name, part in rng.capture_rng_state().items()}))
    assert len(shapes) == 1


@pytest.mark.parametrize("draws", [0, 1, 2, 1000])
def test_random_state_is_restored_exactly(draws):
    def draw() -> tuple[object, ...]:
        return (
            [random.gauss(0, 1) for _ in range(3)],
            numpy.random.standard_normal(3).tolist(),
            torch.randn(3).tolist(),
            random.random(),
        )

    rng.seed_all(7)
    for _ in range(draws):
        random.gauss(0, 1)
        numpy.random.standard_normal()
    state = rng.capture_rng_state()
    expected = draw()
    rng.seed_all(8)
    rng.restore_rng_state(state)
    assert draw() == expected


@pytest.mark.slow
def test_hanging_disk_does_not_block_the_training(tmp_path, monkeypatch, capsys):
    """The disk recovers only after ten more steps; if training waited, neither would continue."""
    monkeypatch.setattr(training_checkpoints, "_MAX_WAIT_S", 0.3)
    released, commit = threading.Event(), CheckpointDir.commit

    def hang(directory, path, step, files):
        assert step != 4 or released.wait(120)
        return commit(directory, path, step, files)

    def release():
        released.set()
        wait_for(lambda: 4 in steps(tmp_path), 10, "the checkpoint for which the disk hung")
        time.sleep(0.5)  # the writer ends shortly after its checkpoint is visible

    monkeypatch.setattr(CheckpointDir, "commit", hang)
    fit(tmp_path, 20, Line(at={2: lambda: time.sleep(0.2), 14: release}), keep_last=20)
    (failure,) = events(tmp_path, "failure")
    assert failure["cause"].startswith("The checkpoint of step 4 is still being written after ")
    assert failure["cause"].endswith("the state after step 6 is not saved.")
    assert "Training continues" in capsys.readouterr().out
    assert not {6, 8, 10, 12} & set(steps(tmp_path))
    assert {2, 4, 16, 18, 20} <= set(steps(tmp_path))


@pytest.mark.slow
def test_step_validated_after_a_stop_counts_among_the_best(tmp_path):
    """An undisturbed run validates and saves at step 4; this one was stopped there, and validates later."""
    settings = {
        "validate_every": 4,
        "keep_best": 1,
        "monitor": "val_up",
        "keep_last": 1,
        "checkpoint_every": 100,
    }
    fit(tmp_path / "whole", 12, **settings)
    module = Line(at={3: lambda: signal.raise_signal(signal.SIGTERM)})
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", 12, module, **settings)
    assert steps(tmp_path / "parts") == [4], "stopped where validation was due"
    fit(tmp_path / "parts", 12, **settings)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole") == [4, 12]


def test_run_without_a_submission_is_writable_by_its_owner_only(tmp_path):
    before = os.umask(0o002)
    try:
        fit(tmp_path / "run", max_steps=2, checkpoint_every=1)
    finally:
        os.umask(before)
    entries = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert [path for path in entries if path.stat().st_mode & 0o022] == []
