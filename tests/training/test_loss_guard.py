"""Losses that are not finite, or far above the ones before: each policy, on one rank and on two."""

import math
import os
import signal
import statistics

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpctrain
from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import BadLoss, UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.runtime.failure_file import failure_record
from hpctrain.training.data.sample_order import SampleOrder
from hpctrain.training.observe.loss_guard import MAX_CONSECUTIVE, SpikeDetector

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

SEED, BATCH, STEPS = 3, 8, 12
NAN = math.nan


def samples() -> list[torch.Tensor]:
    return list(torch.randn(512, 3, generator=torch.Generator().manual_seed(5)))


class Net(hpctrain.Module):
    """A step's loss, on one rank, or its gradient is multiplied by `factors[step]`."""

    def __init__(
        self, factors=None, *, rank=0, stop_in=None, gradient=False, dropout=0.0, adam=False
    ) -> None:
        super().__init__()
        self.adam = adam
        torch.manual_seed(7)
        self.net = nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)
        )
        self.register_buffer("mask", torch.full((3,), -math.inf))
        self.factors, self.rank, self.stop_in, self.gradient = factors or {}, rank, stop_in, gradient
        self.trained = []

    def training_step(self, batch, batch_idx):
        step = batch_idx + 1
        self.trained.append(step)
        if self.stop_in == len(self.trained):
            os.kill(os.getpid(), signal.SIGTERM)
        factor = self.factors.get(step, 1.0)
        if factor != 1.0 and int(os.environ.get("RANK", "0")) == self.rank:
            if self.gradient:
                batch.requires_grad_(False)
                out = self.net(batch)
                out.register_hook(lambda gradient: gradient * factor)
                return out.pow(2).mean()
            batch = batch * factor
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.adam:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]


def fit(run_dir, module=None, data=None, **settings) -> Net:
    module = module or Net()
    trainer = hpctrain.Trainer(
        global_batch_size=BATCH, run_dir=run_dir, seed=SEED,
        **{"max_steps": STEPS, "checkpoint_every": 2, **settings},
    )  # fmt: skip
    trainer.fit(module, data or samples())
    return module


def by_hand(excluded_steps: set[int]) -> dict[str, torch.Tensor]:
    """The state of a loop that leaves some steps out."""
    module, data = Net(), torch.stack(samples())
    module.train()
    (optimizer,), (schedule,) = module.configure_optimizers()
    order = SampleOrder(len(data), SEED)
    for step in range(1, STEPS + 1):
        if step not in excluded_steps:
            module.training_step(
                data[order.indices(0, (step - 1) * BATCH, step * BATCH)], step - 1
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return module.state_dict()


def same(got, expected) -> bool:
    return all(torch.equal(got[name], value) for name, value in expected.items())


def steps(run_dir) -> list[int]:
    return sorted(committed_steps(RunDir(run_dir).checkpoints))


def metrics(run_dir) -> dict[int, dict]:
    return {line["step"]: line for line in read_json_lines(RunDir(run_dir).metrics)}


def bad_events(run_dir) -> list[tuple[int, str]]:
    events = read_json_lines(RunDir(run_dir).events)
    return [(event["step"], event["action"]) for event in events if event["kind"] == "bad_loss"]


# --- stop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [NAN, math.inf])
def test_the_run_stops_before_it_saves_a_bad_state(tmp_path, factor):
    with pytest.raises(BadLoss) as caught:
        fit(tmp_path, Net({6: factor}))
    assert steps(tmp_path) == [2, 4]
    message = str(caught.value)
    assert message.startswith("In step 6, the loss is nan on rank 0. The run stops, because on_bad_loss is")
    assert f"checkpoint: {tmp_path}/checkpoints/step-00000004." in message
    assert failure_record(caught.value, {})["final"]
    assert bad_events(tmp_path) == [(6, "stop")]
    assert math.isnan(metrics(tmp_path)[6]["loss"])
    assert 7 not in metrics(tmp_path)


@pytest.mark.parametrize("step", [6, STEPS])
def test_neither_a_stop_signal_nor_the_end_of_training_saves_a_bad_state(tmp_path, step):
    with pytest.raises(BadLoss):
        fit(tmp_path, Net({step: NAN}, stop_in=step))
    assert steps(tmp_path) == list(range(2, step, 2))[-3:]


@pytest.mark.slow
def test_none_continues_and_the_checkpoints_are_marked(tmp_path, capfd):
    fit(tmp_path, Net({6: NAN}), on_bad_loss=None, keep_last=2)
    assert steps(tmp_path) == [4, 10, 12]
    finite = {one.step: one.manifest.finite for one in list_checkpoints(RunDir(tmp_path))[0]}
    assert finite == {4: True, 10: False, 12: False}
    assert (
        "step-00000012 contains NaN or infinite values in the parameters or the optimizer state."
        in capfd.readouterr().out
    )
    resumed = fit(tmp_path, max_steps=14, keep_last=2)
    out = capfd.readouterr().out
    assert (
        "step-00000012 contains NaN or infinite values in the parameters or the optimizer state. The "
        "checkpoint was renamed to step-00000012.broken-0." in out
    )
    assert "resumed after step 4" in out
    assert resumed.trained[0] == 5
    assert steps(tmp_path) == [12, 14]


def test_a_gradient_that_is_not_finite_stops_the_run_if_its_norm_is_known(tmp_path):
    with pytest.raises(BadLoss, match="In step 6, the gradient norm is nan"):
        fit(tmp_path, Net({6: NAN}, gradient=True), gradient_clip_norm=1.0)
    assert steps(tmp_path) == [2, 4]
    with pytest.raises(BadLoss, match="In step 7, the loss is nan"):
        fit(tmp_path / "unknown", Net({6: NAN}, gradient=True))


@pytest.mark.slow
def test_steps_that_the_loss_scaler_skips_are_not_bad(tmp_path):
    """The first scale of 2^16 overflows float16 for gradients above 1."""
    settings = {"precision": "16-mixed", "gradient_clip_norm": 1.0}
    module = fit(tmp_path, Net({1: 1000.0}, gradient=True), **settings)
    assert module.trained == [*range(1, STEPS + 1)]
    assert bad_events(tmp_path) == []
    assert not math.isfinite(metrics(tmp_path)[1]["grad_norm"])
    last = 2 + MAX_CONSECUTIVE
    with pytest.raises(BadLoss, match=f"In step {last}, the loss is nan"):
        fit(tmp_path / "ever", Net(dict.fromkeys(range(3, 30), NAN)), max_steps=20, **settings)


# --- skip ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [{}, {"micro_batch_size": 2}])
def test_a_skipped_step_leaves_weights_optimizer_and_buffers(tmp_path, parts, capfd):
    module = fit(tmp_path, Net({6: NAN, 7: NAN}), on_bad_loss="skip", **parts)
    if not parts:
        assert same(module.state_dict(), by_hand({6, 7}))
    assert all(torch.isfinite(value).all() for name, value in module.state_dict().items() if name != "mask")
    assert bad_events(tmp_path) == [(6, "skip"), (7, "skip")]
    assert (
        "in step 6, the loss is nan on rank 0, so the update of this step is skipped"
        in capfd.readouterr().out
    )
    lines = metrics(tmp_path)
    assert {step for step, line in lines.items() if line.get("update_skipped") == 1.0} == {6, 7}
    assert [*lines] == [*range(1, STEPS + 1)]
    assert all(math.isfinite(line["loss"]) == (step not in (6, 7)) for step, line in lines.items())


# --- rollback ------------------------------------------------------------------------------------------


class Measured(Net):
    """Training and validation have a metric of the same name."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "largest": batch.max()}

    def validation_step(self, batch, batch_idx):
        return {"largest": batch.max()}


def test_validation_after_an_excluded_step_has_the_usual_names(tmp_path):
    settings = {"max_steps": 9, "global_batch_size": BATCH, "checkpoint_every": 2, "validate_every": 3}
    trainer = hpctrain.Trainer(run_dir=tmp_path, seed=SEED, on_bad_loss="rollback", **settings)
    trainer.fit(Measured({6: NAN}), samples(), samples()[:8])
    lines = list(read_json_lines(RunDir(tmp_path).metrics))
    validated = {line["step"]: line.get("largest") for line in lines if "val_largest" in line}
    assert [*validated] == [3, 6, 9]
    assert validated[6] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "num_workers"),
    [pytest.param(6, 0, marks=pytest.mark.extended), pytest.param(7, 0, marks=pytest.mark.extended), (7, 1)],
)
def test_a_rolled_back_run_leaves_the_batch_out(tmp_path, step, num_workers):
    module = fit(tmp_path, Net({step: NAN}), on_bad_loss="rollback", num_workers=num_workers)
    assert same(module.state_dict(), by_hand({step}))
    assert module.trained.count(step) == 1
    assert bad_events(tmp_path) == [(step, "rollback")]
    assert metrics(tmp_path)[step]["update_skipped"] == 1.0
    assert steps(tmp_path) == [8, 10, 12]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("stop_in", [6, 8, 10])
def test_a_stopped_run_ends_with_the_same_bits(tmp_path, policy, stop_in):
    settings = {"on_bad_loss": policy, "checkpoint_every": 4}
    whole = fit(tmp_path / "whole", Net({6: NAN, 9: NAN}, dropout=0.5), **settings)
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", Net({6: NAN, 9: NAN}, dropout=0.5, stop_in=stop_in), **settings)
    parts = fit(tmp_path / "parts", Net({6: NAN, 9: NAN}, dropout=0.5), **settings)
    assert same(parts.state_dict(), whole.state_dict())
    got, expected = metrics(tmp_path / "parts"), metrics(tmp_path / "whole")
    assert {s: repr(got[s]["loss"]) for s in got} == {s: repr(expected[s]["loss"]) for s in expected}


class Killed(BaseException):
    pass


def test_a_run_killed_before_its_next_checkpoint_leaves_the_same_batch_out(tmp_path):
    """The record in the run folder counts, even if the batch would be good now."""

    class Dies(Net):
        def training_step(self, batch, batch_idx):
            if len(self.trained) == 9:
                raise Killed
            return super().training_step(batch, batch_idx)

    with pytest.raises(Killed):
        fit(tmp_path, Dies({7: NAN}), on_bad_loss="rollback", checkpoint_every=4)
    assert steps(tmp_path) == [4]
    module = fit(tmp_path, Net(), on_bad_loss="rollback", checkpoint_every=4)
    assert 7 not in module.trained
    assert same(module.state_dict(), by_hand({7}))


@pytest.mark.slow
def test_a_stream_is_rolled_back_too(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.position = 0

        def __iter__(self):
            while self.position < 512:
                self.position += 1
                yield samples()[self.position - 1]
            self.position = 0

        def state_dict(self):
            return {"position": self.position}

        def load_state_dict(self, state):
            self.position = state["position"]

    whole = fit(tmp_path / "whole", Net({7: NAN}), Stream(), on_bad_loss="rollback")
    assert whole.trained == [*range(1, 9), *range(8, STEPS + 1)]
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", Net({7: NAN}, stop_in=10), Stream(), on_bad_loss="rollback")
    parts = fit(tmp_path / "parts", Net({7: NAN}), Stream(), on_bad_loss="rollback")
    assert same(parts.state_dict(), whole.state_dict())


class StatelessStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from samples()


@pytest.mark.parametrize(
    ("step", "data", "message"),
    [
        (2, None, r"In step 2, .* there is no checkpoint to return to"),
        (7, StatelessStream(), r"In step 7, .* train_dataset has no state_dict\(\)"),
    ],
)
def test_run_stops_if_it_cannot_be_rolled_back(tmp_path, step, data, message):
    with pytest.raises(BadLoss, match=message):
        fit(tmp_path, Net({step: NAN}), data, on_bad_loss="rollback")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", pytest.param("rollback", marks=pytest.mark.extended)])
def test_many_bad_steps_in_a_row_end_the_run(tmp_path, policy):
    bad = dict.fromkeys(range(4, 4 + MAX_CONSECUTIVE), NAN)
    with pytest.raises(BadLoss, match=rf"In step {max(bad)}, .* {len(bad)} consecutive steps were bad"):
        fit(tmp_path / "ends", Net(bad), on_bad_loss=policy, max_steps=20)
    del bad[8]
    fit(tmp_path / "continues", Net(bad), on_bad_loss=policy, max_steps=20)


# --- spikes --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["rollback", *(pytest.param(each, marks=pytest.mark.long) for each in ("stop", "skip"))]
)
def test_a_spike_is_a_bad_loss_if_there_are_enough_losses_before(tmp_path, policy):
    settings = {"max_steps": 50, "on_bad_loss": policy, "loss_spike_threshold": 20, "checkpoint_every": 10}

    class Level(Net):
        """A loss of about 1, which the weights do not change."""

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return 0 * loss + (1 + 0.01 * (batch_idx % 7)) * (5.0 if batch_idx + 1 in (10, 45) else 1.0)

    if policy == "stop":
        with pytest.raises(BadLoss, match=r"In step 45, the loss is 5.1, above the spike limit of 1.\d*\."):
            fit(tmp_path, Level(), **settings)
    else:
        fit(tmp_path, Level(), **settings)
    assert bad_events(tmp_path) == [(45, policy)]
    fit(tmp_path / "off", Level(), **{**settings, "loss_spike_threshold": None})
    if policy == "skip":
        # The gradients of float16 are unscaled before the step is skipped.
        scaled = {"precision": "16-mixed", "gradient_clip_norm": 1e6}
        fit(tmp_path / "scaled", Level(), **settings, **scaled)
        assert bad_events(tmp_path / "scaled") == [(45, "skip")]
    assert bad_events(tmp_path / "off") == []


numbers = st.floats(-1e6, 1e6).filter(lambda value: value == 0 or abs(value) > 1e-6)


def limit_by_definition(losses: list[float], threshold: float) -> float:
    """The modified z-score, solved for the loss."""
    middle = statistics.median(losses)
    mad = statistics.median(abs(loss - middle) for loss in losses)
    return middle + threshold * max(mad / 0.6745, 0.01 * abs(middle))


@pytest.mark.slow
@given(st.lists(numbers, min_size=32, max_size=300), st.floats(1, 100))
def test_spikes_are_those_of_the_definition(losses, threshold):
    detector = SpikeDetector(threshold)
    for number, each in enumerate(losses):
        assert number >= 32 or detector.limit() == math.inf
        detector.add(each)
    limit = limit_by_definition(losses[-128:], threshold)
    if limit > statistics.median(losses[-128:]):
        assert detector.limit() == pytest.approx(limit, rel=1e-12)
    else:  # a median of 0 without deviation has no scale
        assert detector.limit() == math.inf


# --- checkpoints ---------------------------------------------------------------------------------------


def test_without_a_finite_checkpoint_the_newest_is_loaded(tmp_path):
    store = CheckpointStore(tmp_path, checked=lambda key: key == "state/module/w")
    for step, value in ((1, NAN), (2, -math.inf)):
        store.save(step, {"module": {"w": torch.tensor([1.0, value])}, "n": torch.tensor(1)}, {})
    loaded, sentences = store.load_newest()
    assert (loaded.step, sentences) == (2, [])


def test_a_checkpointer_checks_parameters_and_optimizers_but_not_buffers(tmp_path):
    module = Net()
    (optimizer,), _ = module.configure_optimizers()
    checkpointer = hpctrain.Checkpointer(run_dir=tmp_path, module=module, optimizer=optimizer)
    checkpointer.load()
    module.net(torch.stack(samples())).pow(2).mean().backward()
    optimizer.step()
    checkpointer.save(1)
    optimizer.state[module.net[0].weight]["momentum_buffer"][0] = math.inf
    checkpointer.save(2)
    finite = {one.step: one.manifest.finite for one in list_checkpoints(RunDir(tmp_path))[0]}
    assert finite == {1: True, 2: False}


# --- refusals ------------------------------------------------------------------------------------------


class TakesTurns(Net):
    def training_step(self, batch, batch_idx, optimizer_idx):
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss_spike_threshold": 0}, "loss_spike_threshold is 0, but must be"),
        ({"on_bad_loss": "rollback", "checkpoint_every": None}, "checkpoint_every is None"),
        ({"on_bad_loss": "rollback", "local_checkpoints": "auto"}, "local_checkpoints is 'auto'"),
        ({"on_bad_loss": "rollback", "run_dir": None}, "there is no run folder"),
        ({"on_bad_loss": "skip", "algorithm": "powersgd"}, "does not work with algorithm='powersgd'"),
        ({"on_bad_loss": "skip", "module": TakesTurns()}, "training_step accepts optimizer_idx"),
    ],
)
def test_what_does_not_work_is_refused_before_the_first_step(tmp_path, settings, words):
    settings = {"run_dir": tmp_path, "module": Net(), **settings}
    with pytest.raises(UserError, match=words):
        fit(**settings)
    assert settings["module"].trained == []


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback", None])
def test_a_custom_loop_can_stop(tmp_path, policy):
    def train() -> int:
        with hpctrain.session(run_dir=tmp_path, on_bad_loss=policy, checkpoint_every=2) as session:
            model = nn.Linear(3, 1)
            model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            for batch in session.batches(samples(), global_batch_size=BATCH, max_steps=8):
                loss = model(batch).pow(2).mean() * (NAN if session.step == 5 else 1.0)
                session.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                session.log(loss=loss)
        return session.step

    if policy is None:
        assert train() == 8
        return
    with pytest.raises(UserError if policy != "stop" else BadLoss):
        train()
    assert steps(tmp_path) == ([2, 4] if policy == "stop" else [])


# --- two ranks -----------------------------------------------------------------------------------------


def train_on_two(run_dir, settings, stop_in=None) -> tuple[dict, str]:
    """Only rank 1 has a bad loss; each rank returns its state, or the message of the error."""
    adam = settings.get("algorithm") == "qadam"
    module = Net({6: NAN}, rank=1, stop_in=stop_in if dist.get_rank() == 1 else None, adam=adam)
    try:
        fit(run_dir, module, **settings)
    except BadLoss as error:
        return {}, str(error)
    except SystemExit:
        return {}, "stopped"
    return {name: value.tolist() for name, value in module.state_dict().items()}, ""


@pytest.mark.ranks
def test_a_bad_loss_of_one_rank_stops_both(tmp_path):
    for _, message in run_on_ranks(train_on_two, tmp_path, {}):
        assert message.startswith("In step 6, the loss is nan on rank 1. The run stops")
        assert "step-00000004" in message
    assert steps(tmp_path) == [2, 4]


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("policy", "strategy"),
    [
        ("skip", "ddp"),
        pytest.param("rollback", "ddp", marks=pytest.mark.long),
        pytest.param("skip", "zero3", marks=pytest.mark.long),
        ("rollback", "zero3"),
    ],
)
def test_both_ranks_skip_or_roll_back(tmp_path, policy, strategy):
    settings = {"on_bad_loss": policy, "strategy": strategy, "micro_batch_size": 2}
    (first, _), (second, _) = run_on_ranks(train_on_two, tmp_path / "whole", settings)
    parameters = [name for name in first if "weight" in name or "bias" in name]
    assert len(parameters) == 6
    for name in parameters:
        assert first[name] == second[name]
        assert torch.isfinite(torch.tensor(first[name])).all()
    assert bad_events(tmp_path / "whole") == [(6, policy)]
    stopped = run_on_ranks(train_on_two, tmp_path / "parts", settings, 10)
    assert [message for _, message in stopped] == ["stopped", "stopped"]
    (resumed, _), _ = run_on_ranks(train_on_two, tmp_path / "parts", settings)
    assert {name: resumed[name] for name in parameters} == {name: first[name] for name in parameters}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "algorithm",
    ["powersgd", *(pytest.param(name, marks=pytest.mark.long) for name in ("qadam", "local_sgd"))],
)
def test_every_algorithm_rolls_back(tmp_path, algorithm):
    """The result is that of a run that never trained the batch."""
    settings = {"on_bad_loss": "rollback", "algorithm": algorithm}
    (rolled_back, _), _ = run_on_ranks(train_on_two, tmp_path / "rolled-back", settings)
    assert bad_events(tmp_path / "rolled-back") == [(6, "rollback")]
    recorded = RunDir(tmp_path / "recorded")
    recorded.path.mkdir()
    recorded.log_event("bad_loss", 0, step=6, action="rollback")
    (never_trained, _), _ = run_on_ranks(train_on_two, recorded.path, settings)
    assert len(bad_events(recorded.path)) == 1
    assert rolled_back == never_trained
