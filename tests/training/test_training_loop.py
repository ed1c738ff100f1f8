"""Features of the training loop, compared with loops without hpctrain."""

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCRIPTS
from test_trainer import losses, run_script
from torch import nn
from torch.utils.data import Dataset
from train_regression import Gan, Noisy, Regression, Tokens, samples

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.data.sample_order import SampleOrder
from hpctrain.training.loop.train_step import lr_factor
from hpctrain.training.observe import environment_info
from hpctrain.training.optim.module_transforms import activation_checkpointing
from hpctrain.training.optim.optimizer_setup import only_trainable
from hpctrain.training.trainer_config import TrainerConfig

SCRIPT = SCRIPTS / "train_regression.py"


def train(run: Path, *args: object, ranks: int = 1) -> dict:
    """Return the result of `train_regression.py`; the ranks must end with equal parameters."""
    result = run_script(SCRIPT, run, *args, ranks=ranks)
    assert all(state == result["state"][0] for state in result["state"])
    return result


def batches(num_steps: int, size: int = 10):
    """Return the batches of the first steps, with their numbers in their epochs."""
    data = samples()
    count = len(data[0])
    all_batches = [
        (number, SampleOrder(count, 3).indices(epoch, start, min(start + size, count)))
        for epoch in range(num_steps)
        for number, start in enumerate(range(0, count, size))
    ]
    return [(number, [column[indices] for column in data]) for number, indices in all_batches[:num_steps]]


def state_of(module: nn.Module) -> list[float]:
    return torch.cat([value.double().flatten() for value in module.state_dict().values()]).tolist()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "ddp"),
        *(pytest.param(3, name, marks=pytest.mark.extended) for name in ("ddp", "zero1")),
        (3, "zero3"),
    ],
)
def test_gradient_norm_is_clipped_over_all_parameters(tmp_path, ranks, strategy):
    module = Regression()
    optimizer, norms = module.configure_optimizers(), []
    for number, batch in batches(6):
        module.training_step(batch, number).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 5.0).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < 5.0 < max(norms)
    args = ("gradient_clip_norm=5.0", "micro_batch_size=2", f'strategy="{strategy}"')
    result = train(tmp_path, "regression", 6, *args, ranks=ranks)
    # Some strategies compute the norm in float32.
    assert result["state"][0] == pytest.approx(state_of(module), rel=1e-5)
    logged = [line["grad_norm"] for line in read_json_lines(RunDir(tmp_path).metrics)]
    assert logged == pytest.approx(norms, rel=1e-5)


@pytest.mark.ranks
def test_gradients_are_unscaled_before_clipping_in_float16(tmp_path):
    """Elements of 2^16 times the gradient would all be clipped."""
    plain = train(tmp_path / "32", "regression", 1, "gradient_clip_value=5.0")
    scaled = train(
        tmp_path / "16", "regression", 1, "gradient_clip_value=5.0", 'precision="16-mixed"', ranks=2
    )
    assert scaled["state"][0] == pytest.approx(plain["state"][0], rel=1e-2, abs=1e-3)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "ddp"), pytest.param(3, "ddp", marks=pytest.mark.extended), (2, "zero3")]
)
def test_mean_over_tokens_is_over_the_global_batch(tmp_path, ranks, strategy):
    """Means of micro-batches with different numbers of tokens must not be averaged equally."""
    module = Tokens()
    optimizer, means = module.configure_optimizers(), []
    for number, batch in batches(5):
        loss = module.training_step(batch, number)["loss"]
        means.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = train(tmp_path, "tokens", 5, "micro_batch_size=2", f'strategy="{strategy}"', ranks=ranks)
    # The factor of the gradients is a float32.
    assert result["state"][0] == pytest.approx(state_of(module), rel=1e-5)
    assert list(losses(tmp_path).values()) == pytest.approx(means, rel=1e-5)
    first = next(iter(read_json_lines(RunDir(tmp_path).metrics)))
    assert first["num_tokens"] == batches(1)[0][1][2].sum()


def test_micro_batch_without_tokens_adds_nothing_to_the_loss():
    sums = MetricAccumulator()
    for loss, tokens in ((2.0, 3.0), (math.nan, 0.0)):
        sums.add({"loss": torch.tensor(loss), "num_tokens": torch.tensor(tokens)}, 0.5)
    assert sums.values == {"loss": 6.0, "num_tokens": 3.0}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "ddp"), pytest.param(3, "ddp", marks=pytest.mark.extended), (2, "zero1")]
)
def test_alternating_optimizers_see_the_whole_batch_in_order(tmp_path, ranks, strategy):
    module = Gan()
    optimizers = module.configure_optimizers()
    for number, batch in batches(7):
        for idx, optimizer in enumerate(optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            with only_trainable(module, parameters):
                outputs = module.training_step(batch, number, idx)
                if outputs is not None:
                    outputs["loss"].backward()
                    optimizer.step()
            module.zero_grad()
    result = train(tmp_path, "gan", 7, "micro_batch_size=2", f'strategy="{strategy}"', ranks=ranks)
    assert result["state"][0] == pytest.approx(state_of(module), rel=1e-9)


def test_manual_optimization_is_refused_with_a_hint():
    class ManualOptimization(Regression):
        automatic_optimization = False

    with pytest.raises(hpctrain.UserError, match="third parameter, optimizer_idx"):
        hpctrain.Trainer(max_steps=1).fit(ManualOptimization(), samples())


@pytest.mark.ranks
def test_early_stopping_ends_all_ranks_permanently(tmp_path):
    result = train(tmp_path, "regression", 500, "patience=2", "validate_every=5", ranks=2)
    validations = [
        line["val_loss"] for line in read_json_lines(RunDir(tmp_path).metrics) if "val_loss" in line
    ]
    steps = [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics) if "val_loss" in line]
    assert result["step"] == steps[-1] < 500
    best = min(range(len(validations)), key=lambda i: validations[i])
    assert len(validations) - 1 - best <= 2
    assert "did not improve" in result["ending"]
    checkpoint = RunDir(tmp_path).checkpoints / f"step-{result['step']:08d}"
    assert (checkpoint / "manifest.json").exists()
    resumed = train(tmp_path, "regression", 500, "patience=2", "validate_every=5", ranks=1)
    assert resumed["step"] == result["step"]
    assert resumed["state"][0] == result["state"][0]
    extended = train(tmp_path, "regression", 500, "patience=4", "validate_every=5", ranks=1)
    assert extended["step"] > result["step"]


def test_early_stopping_on_nan_ends_permanently():
    trainer = hpctrain.Trainer(max_steps=1)
    stopping = hpctrain.EarlyStopping(patience=2)
    for _ in range(2):
        stopping.on_validation_end(trainer, Regression(), {"val_loss": float("nan")})
    assert trainer.ending == "val_loss was NaN in 2 validation runs"
    restored, trainer.step, trainer.ending = hpctrain.EarlyStopping(patience=2), 1, None
    restored.load_state_dict(stopping.state_dict())
    restored.on_fit_start(trainer, Regression())
    assert trainer.ending == "val_loss was NaN in 2 validation runs"


def test_early_stopping_can_be_used_for_another_training():
    stopping = hpctrain.EarlyStopping(patience=1)
    stopping.load_state_dict({"best": 0.0, "waited": 1})
    trainer = hpctrain.Trainer(max_steps=4, validate_every=2, callbacks=stopping)
    trainer.fit(Regression(), samples(), samples())
    assert trainer.step == 4


class StopOnTrainingMetric(hpctrain.EarlyStopping):
    """Monitors a training metric."""

    def on_step_end(self, trainer, module, metrics):
        self.on_validation_end(trainer, module, metrics)


def test_early_stopping_on_a_training_metric_needs_no_validation():
    trainer = hpctrain.Trainer(
        max_steps=50, callbacks=StopOnTrainingMetric("loss", patience=1, min_delta=1e9)
    )
    trainer.fit(Regression(), samples())
    assert trainer.ending is not None
    assert trainer.step < 50


class Frozen(Regression):
    """A frozen body in eval mode; validation returns the same metric as training."""

    def __init__(self) -> None:
        super().__init__()
        self.body.eval()

    def training_step(self, batch, batch_idx):
        assert (self.training, self.body.training, self.head.training) == (True, False, True)
        return {"loss": super().training_step(batch, batch_idx), "of_training": 1.0}

    def validation_step(self, batch, batch_idx):
        assert not self.training
        return {"loss": 5.0 * super().training_step(batch, batch_idx)}


def test_submodules_keep_their_modes_and_validation_keeps_the_training_loss(tmp_path):
    module = Frozen()
    trainer = hpctrain.Trainer(
        max_steps=4, validate_every=2, run_dir=tmp_path, callbacks=hpctrain.EarlyStopping()
    )
    trainer.fit(module, samples(), samples())
    assert [*trainer.metrics] == ["val_loss"]
    last = list(read_json_lines(RunDir(tmp_path).metrics))[-1]
    assert last["val_loss"] > last["loss"]
    trainer.validate(module, samples())
    trainer.predict(module, [torch.zeros(2, 3, dtype=torch.float64)])
    assert (module.training, module.body.training, module.head.training) == (True, False, True)


@pytest.mark.ranks
@pytest.mark.parametrize("names", [pytest.param("order", marks=pytest.mark.extended), "other", "time"])
def test_metrics_must_have_equal_names_on_every_rank(tmp_path, names):
    """Otherwise, more metrics on one rank would crash both."""
    if names == "order":
        train(tmp_path, "named", 20, 'names="order"', ranks=2)
        for line in read_json_lines(RunDir(tmp_path).metrics):
            assert (line["a"], line["b"]) == pytest.approx((10, 20))
        return
    message = "reserved in metrics.jsonl" if names == "time" else r"\['a', 'b', 'loss'\] on rank 0, but \["
    with pytest.raises(AssertionError, match=f"UserError: .*{message}"):
        train(tmp_path, "named", 20, f'names="{names}"', ranks=2)


def test_metric_names_must_not_differ_between_micro_batches():
    class ChangingNames(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.calls = getattr(self, "calls", 0) + 1
            return {"loss": loss, "odd" if self.calls % 2 else "even": 1.0}

        def validation_step(self, batch, batch_idx):
            return self.training_step(batch, batch_idx)

    trainer = hpctrain.Trainer(max_steps=2, global_batch_size=8, micro_batch_size=4)
    with pytest.raises(hpctrain.UserError, match="for a micro-batch, but"):
        trainer.fit(ChangingNames(), samples())
    with pytest.raises(hpctrain.UserError, match=r"validation_step returned .* for a batch, but"):
        trainer.validate(ChangingNames(), samples())


@pytest.mark.ranks
def test_callback_on_one_rank_ends_the_training_on_all(tmp_path):
    result = train(tmp_path, "regression", 500, "ends_at=6", ranks=3)
    assert 6 < result["step"] <= 9
    assert [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics)] == [
        *range(1, result["step"] + 1)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 4])
def test_short_steps_with_joint_messages_are_logged_individually(tmp_path, ranks):
    """A step callback makes each step send its own message. On four ranks, the order of a sum matters."""
    together = train(tmp_path / "together", "regression", 80, ranks=ranks)
    separate = train(tmp_path / "alone", "regression", 80, "ends_at=1000", ranks=ranks)
    assert together == separate
    assert losses(tmp_path / "together") == losses(tmp_path / "alone")
    lines = list(read_json_lines(RunDir(tmp_path / "together").metrics))
    assert [line["step"] for line in lines] == [*range(1, 81)]
    assert all(before["time"] <= after["time"] for before, after in itertools.pairwise(lines))
    assert all(line["spent"]["all"] > 0 for line in lines)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.extended), 3])
def test_test_and_predict_see_every_sample_once_in_order(tmp_path, ranks):
    result = train(tmp_path, "regression", 3, ranks=ranks)
    module = Regression()
    nn.utils.vector_to_parameters(torch.tensor(result["state"][0]).double(), module.parameters())
    with torch.no_grad():
        expected, loss = module(samples()[0]), module.training_step(samples(), 0)
    assert result["predictions"] == pytest.approx(expected.flatten().tolist())
    assert result["test"] == pytest.approx({"test_loss": loss.item()})


@pytest.mark.ranks
def test_recomputation_changes_neither_gradients_nor_running_statistics(tmp_path):
    plain = train(tmp_path / "plain", "noisy", 5, "global_batch_size=8", ranks=2)
    recomputed = train(tmp_path / "again", "noisy", 5, "global_batch_size=8", 'recompute=["body"]', ranks=2)
    assert recomputed == plain


def test_activations_of_a_recomputed_block_are_not_stored():
    module, sizes = Noisy(), []

    def record_size(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    def total_size() -> int:
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
            module.training_step(samples(), 0)
        return sum(sizes)

    plain = total_size()
    with activation_checkpointing(module, ["body"]):
        assert total_size() < plain / 2
    assert total_size() == plain
    with pytest.raises(hpctrain.UserError, match=r"recompute contains 'bodies', but no submodule .* matches"):
        activation_checkpointing(module, ["bodies"]).__enter__()
    with pytest.raises(hpctrain.UserError, match=r"both 'body' and its submodule 'body.0'"):
        activation_checkpointing(module, ["body*", "body.*"]).__enter__()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "setting", ["micro_batch_size=2", pytest.param('recompute=["body"]', marks=pytest.mark.long)]
)
def test_static_graph_changes_nothing(tmp_path, setting):
    plain = train(tmp_path / "plain", "regression", 7, setting, ranks=2)
    for last_step in (3, 7):
        static = train(tmp_path / "static", "regression", last_step, setting, "static_graph=true", ranks=2)
    assert static == plain
    for wrong in ({"strategy": "zero3"}, {"find_unused_parameters": True}):
        with pytest.raises(hpctrain.UserError, match="static_graph is True"):
            hpctrain.Trainer(max_steps=1, static_graph=True, **wrong)


@pytest.mark.ranks
def test_alternating_steps_resume_bitwise(tmp_path):
    kind, setting = "gan", "micro_batch_size=2"
    uninterrupted = train(tmp_path / "whole", kind, 7, setting, ranks=2)
    for last_step in (4, 7):
        resumed = train(tmp_path / "parts", kind, last_step, setting, ranks=2)
    assert resumed == uninterrupted
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.ranks
def test_sanity_validation_changes_nothing(tmp_path):
    results = [
        train(tmp_path / str(n), "noisy", 4, "validate_every=2", f"sanity_val_batches={n}") for n in (0, 2)
    ]
    assert results[0] == results[1]
    assert losses(tmp_path / "0") == losses(tmp_path / "2")


@pytest.mark.ranks
def test_learning_rate_scaling_and_warmup_apply_with_any_schedule(tmp_path):
    module = Regression()
    optimizer = module.configure_optimizers()
    settings = TrainerConfig(max_steps=5, global_batch_size=10, lr_reference_batch_size=5, warmup_steps=4)
    for step, (number, batch) in enumerate(batches(5), 1):
        optimizer.param_groups[0]["lr"] = 0.1 * lr_factor(settings, step)
        module.training_step(batch, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    for last_step in (2, 5):  # with a stop
        result = train(tmp_path, "regression", last_step, "lr_reference_batch_size=5", "warmup_steps=4")
    assert result["state"][0] == pytest.approx(state_of(module), rel=1e-9)


def test_learning_rate_factors():
    def factors(steps: tuple[int, ...], **settings: Any) -> list[float]:
        config = TrainerConfig(max_steps=1, global_batch_size=64, **settings)
        return [lr_factor(config, step) for step in steps]

    assert factors((1, 2, 3, 9), lr_reference_batch_size=16, warmup_steps=3) == [2.0, 3.0, 4.0, 4.0]
    assert factors((1, 2, 4), warmup_steps=4) == [0.25, 0.5, 1.0]
    assert factors((1,), lr_reference_batch_size=16, lr_scaling="sqrt") == [2.0]


class Sizes(hpctrain.Module):
    """Records the sizes of validation and test batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(1, 1), list[int]()

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.sizes.append(len(batch))
        return batch.mean()

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("as_stream", [False, True])
def test_evaluations_use_micro_batches(as_stream):
    data, module = torch.arange(10.0)[:, None], Sizes()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    evaluated = Stream() if as_stream else data
    trainer = hpctrain.Trainer(
        max_steps=1, global_batch_size=8, micro_batch_size=3, validate_every=1, sanity_val_batches=1
    )
    trainer.fit(module, data, evaluated)
    assert module.sizes == [3, 3, 3, 3, 1]
    assert trainer.metrics["val_loss"] == pytest.approx(4.5)
    module.sizes.clear()
    assert trainer.test(module, evaluated)["test_loss"] == pytest.approx(4.5)
    assert len(trainer.predict(module, evaluated)) == 4
    assert module.sizes == [3, 3, 3, 1] * 2


def test_hint_about_slow_data_appears_once_during_training(monkeypatch, capsys):
    assert environment_info._SEEN_S <= 10
    assert "so try num_workers=4." in (environment_info.warn_too_few_workers(4.0, 10.0, 2, 8) or "")

    class SlowData(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(0.01)
            return tuple(column[index] for column in samples())

    class Printed(hpctrain.Callback):
        def on_step_end(self, trainer, module, metrics):
            output.append(capsys.readouterr().out)

    output: list[str] = []
    monkeypatch.setattr("hpctrain.training.observe.environment_info._SEEN_S", 0.05)
    trainer = hpctrain.Trainer(max_steps=8, global_batch_size=4, callbacks=[Printed()])
    trainer.fit(Regression(), SlowData())
    assert "s waiting for data with num_workers=0" in "".join(output[:7])
    assert "".join(output).count("waiting for data") == 1
