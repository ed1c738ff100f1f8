"""What people expect of a training loop, held against loops written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.fork_server import run_forked
from test_trainer import losses, variables
from torch import nn
from train_regression import Gan, Noisy, Regression, Tokens, samples

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.training.data.sample_order import SampleOrder
from hpctrain.training.loop.optimizer_step import LrScaler
from hpctrain.training.observe.dataloader_hints import warn_too_few_workers, warn_too_many_workers
from hpctrain.training.observe.progress import SampleRate
from hpctrain.training.optim.activation_checkpoint import activation_checkpointing
from hpctrain.training.optim.optimizer_setup import only_trainable

SCRIPT = SCRIPTS / "train_regression.py"


def train(run: Path, *words: object, ranks: int = 1) -> dict:
    """What `train_regression.py` printed; the ranks end with the same parameters."""
    printed = run_forked(SCRIPT, [str(word) for word in words], variables(run), ranks=ranks)
    told = json.loads(printed.splitlines()[-1])
    assert all(state == told["state"][0] for state in told["state"])
    return told


def batches(num_steps: int, size: int = 10):
    """The batches of the first steps, with their numbers in their epochs."""
    data = samples()
    count = len(data[0])
    found = [
        (number, SampleOrder(count, 3).indices(epoch, start, min(start + size, count)))
        for epoch in range(num_steps)
        for number, start in enumerate(range(0, count, size))
    ]
    return [(number, [column[indices] for column in data]) for number, indices in found[:num_steps]]


def state_of(module: nn.Module) -> list[float]:
    return torch.cat([value.double().flatten() for value in module.state_dict().values()]).tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_gradients_are_clipped_to_a_norm_over_all_parameters(tmp_path, ranks, strategy):
    if ranks == 1 and strategy != "ddp":
        pytest.skip("one rank has nothing in parts")
    module = Regression()
    optimizer, norms = module.configure_optimizers(), []
    for number, batch in batches(6):
        module.training_step(batch, number).backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 5.0).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < 5.0 < max(norms)
    words = ("gradient_clip_norm=5.0", "micro_batch_size=2", f'strategy="{strategy}"')
    told = train(tmp_path, "regression", 6, *words, ranks=ranks)
    # Some strategies take the norm in float32.
    assert told["state"][0] == pytest.approx(state_of(module), rel=1e-5)
    logged = [line["grad_norm"] for line in read_json_lines(RunDir(tmp_path).metrics)]
    assert logged == pytest.approx(norms, rel=1e-5)


@pytest.mark.ranks
def test_gradients_are_clipped_after_the_scale_of_float16_is_taken_off(tmp_path):
    """Elements of 2^16 times the gradient would all be cut."""
    plain = train(tmp_path / "32", "regression", 1, "gradient_clip_value=5.0")
    scaled = train(
        tmp_path / "16", "regression", 1, "gradient_clip_value=5.0", 'precision="16-mixed"', ranks=2
    )
    assert scaled["state"][0] == pytest.approx(plain["state"][0], rel=1e-2, abs=1e-3)


@pytest.mark.ranks
def test_each_element_of_a_gradient_is_cut_to_a_value(tmp_path):
    module = Regression()
    optimizer = module.configure_optimizers()
    for number, batch in batches(4):
        module.training_step(batch, number).backward()
        assert max(p.grad.abs().max() for p in module.parameters()) > 0.05
        nn.utils.clip_grad_value_(module.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    told = train(tmp_path, "regression", 4, "gradient_clip_value=0.05", ranks=2)
    assert told["state"][0] == pytest.approx(state_of(module), rel=1e-9)


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (3, "ddp"), (2, "zero3")])
def test_a_mean_over_tokens_is_one_over_those_of_the_global_batch(tmp_path, ranks, strategy):
    """Means of micro-batches with different numbers of tokens must not be averaged as they are."""
    module = Tokens()
    optimizer, means = module.configure_optimizers(), []
    for number, batch in batches(5):
        loss = module.training_step(batch, number)["loss"]
        means.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    told = train(tmp_path, "tokens", 5, "micro_batch_size=2", f'strategy="{strategy}"', ranks=ranks)
    # The factor that gradients are multiplied by is a float32.
    assert told["state"][0] == pytest.approx(state_of(module), rel=1e-5)
    assert list(losses(tmp_path).values()) == pytest.approx(means, rel=1e-5)
    first = next(iter(read_json_lines(RunDir(tmp_path).metrics)))
    assert first["num_tokens"] == batches(1)[0][1][2].sum()


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (3, "ddp"), (2, "zero1")])
def test_optimizers_that_take_turns_see_the_whole_batch_each_after_the_one_before(tmp_path, ranks, strategy):
    module = Gan()
    optimizers = module.configure_optimizers()
    for number, batch in batches(7):
        for idx, optimizer in enumerate(optimizers):
            own = [p for group in optimizer.param_groups for p in group["params"]]
            with only_trainable(module, own):
                answer = module.training_step(batch, number, idx)
                if answer is not None:
                    answer["loss"].backward()
                    optimizer.step()
            module.zero_grad()
    told = train(tmp_path, "gan", 7, "micro_batch_size=2", f'strategy="{strategy}"', ranks=ranks)
    assert told["state"][0] == pytest.approx(state_of(module), rel=1e-9)


@pytest.mark.ranks
def test_turns_where_parameters_are_in_parts_are_refused(tmp_path):
    with pytest.raises(
        AssertionError,
        match=r"UserError: .*strategy 'zero3' updates all parameters together",
    ):
        train(tmp_path, "gan", 1, 'strategy="zero3"', ranks=2)


def test_a_module_that_wants_to_optimize_by_itself_is_told_how_turns_are_taken():
    class ByItself(Regression):
        automatic_optimization = False

    with pytest.raises(hpctrain.UserError, match="third parameter, optimizer_idx"):
        hpctrain.Trainer(max_steps=1).fit(ByItself(), samples())


@pytest.mark.ranks
def test_early_stopping_ends_on_all_ranks_and_stays_ended(tmp_path):
    told = train(tmp_path, "regression", 500, "patience=2", "validate_every=5", ranks=2)
    validations = [
        line["val_loss"] for line in read_json_lines(RunDir(tmp_path).metrics) if "val_loss" in line
    ]
    steps = [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics) if "val_loss" in line]
    assert told["step"] == steps[-1] < 500
    best = min(range(len(validations)), key=lambda i: validations[i])
    assert len(validations) - 1 - best <= 2
    assert "did not improve" in told["ending"]
    checkpoint = RunDir(tmp_path).checkpoints / f"step-{told['step']:08d}"
    assert (checkpoint / "manifest.json").exists()
    again = train(tmp_path, "regression", 500, "patience=2", "validate_every=5", ranks=1)
    assert again["step"] == told["step"]
    assert again["state"][0] == told["state"][0]
    further = train(tmp_path, "regression", 500, "patience=4", "validate_every=5", ranks=1)
    assert further["step"] > told["step"]


def test_early_stopping_by_a_metric_that_is_never_a_number_ends_and_stays_ended():
    trainer = hpctrain.Trainer(max_steps=1)
    stopping = hpctrain.EarlyStopping(patience=2)
    for _ in range(2):
        stopping.on_validation_end(trainer, Regression(), {"val_loss": float("nan")})
    assert trainer.ending == "val_loss was NaN in 2 validations"
    again = hpctrain.EarlyStopping(patience=2)
    again.load_state_dict(stopping.state_dict())
    again.on_fit_start(trainer, Regression())


class OnTraining(hpctrain.EarlyStopping):
    """Goes by what is trained."""

    def on_step_end(self, trainer, module, metrics):
        self.on_validation_end(trainer, module, metrics)


def test_early_stopping_by_what_is_trained_needs_no_validation():
    trainer = hpctrain.Trainer(max_steps=50, callbacks=OnTraining("loss", patience=1, min_delta=1e9))
    trainer.fit(Regression(), samples())
    assert trainer.ending is not None
    assert trainer.step < 50


@pytest.mark.parametrize("how", ["class", "instance"])
def test_an_optimizer_with_a_zero_grad_of_its_own_is_asked_for_it(how):
    asked = []

    class Careful(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            asked.append(set_to_none)
            super().zero_grad(set_to_none)

    class Model(Regression):
        def configure_optimizers(self):
            if how == "class":
                return Careful(self.parameters(), lr=0.1)
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            torchs = optimizer.zero_grad
            optimizer.zero_grad = lambda set_to_none=True: (asked.append(set_to_none), torchs())
            return optimizer

    module = Model()
    hpctrain.Trainer(max_steps=3).fit(module, samples())
    assert asked == [True] * 3
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_batch_that_is_larger_than_the_data_is_remarked_on(capfd):
    data = samples()
    has = len(data[0])
    hpctrain.Trainer(max_steps=1, global_batch_size=has + 1).fit(Regression(), data)
    assert (
        f"hpctrain: global_batch_size is {has + 1}, but train_dataset has only {has} samples; "
        "every step uses all samples\n"
    ) in capfd.readouterr().out


class Frozen(Regression):
    """Its body is not to be in training mode; what it validates is called as what it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body.eval()

    def training_step(self, batch, batch_idx):
        assert (self.training, self.body.training, self.head.training) == (True, False, True)
        return {"loss": super().training_step(batch, batch_idx), "of_training": 1.0}

    def validation_step(self, batch, batch_idx):
        assert not self.training
        return {"loss": 5.0 * super().training_step(batch, batch_idx)}


def test_parts_keep_their_modes_and_a_validation_leaves_the_loss_of_the_training(tmp_path):
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
@pytest.mark.parametrize("names", ["order", "other", "more", "time"])
def test_metrics_have_the_same_names_on_every_rank_in_any_order(tmp_path, names):
    """More of them on one rank would otherwise end both by a signal."""
    if names == "order":
        train(tmp_path, "named", 20, 'names="order"', ranks=2)
        for line in read_json_lines(RunDir(tmp_path).metrics):
            assert (line["a"], line["b"]) == pytest.approx((10, 20))
        return
    words = "reserved in metrics.jsonl" if names == "time" else r"\['a', 'b', 'loss'\] on rank 0, but \["
    with pytest.raises(AssertionError, match=f"UserError: .*{words}"):
        train(tmp_path, "named", 20, f'names="{names}"', ranks=2)


@pytest.mark.ranks
def test_names_that_change_from_step_to_step_are_told_apart(tmp_path):
    train(tmp_path, "named", 20, 'names="turns"', ranks=2)
    for line in read_json_lines(RunDir(tmp_path).metrics):
        assert line["a" if line["step"] % 3 else "c"] == pytest.approx(10)


def test_names_that_only_some_batches_have_are_refused():
    class Some(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.calls = getattr(self, "calls", 0) + 1
            return {"loss": loss, "odd" if self.calls % 2 else "even": 1.0}

        def validation_step(self, batch, batch_idx):
            return self.training_step(batch, batch_idx)

    trainer = hpctrain.Trainer(max_steps=2, global_batch_size=8, micro_batch_size=4)
    with pytest.raises(hpctrain.UserError, match="for a micro-batch, but"):
        trainer.fit(Some(), samples())
    with pytest.raises(hpctrain.UserError, match=r"validation_step returned .* for a batch, but"):
        trainer.validate(Some(), samples())


@pytest.mark.ranks
def test_a_callback_on_one_rank_ends_the_training_on_all(tmp_path):
    told = train(tmp_path, "regression", 500, "ends_at=6", ranks=3)
    assert 6 < told["step"] <= 9
    assert [line["step"] for line in read_json_lines(RunDir(tmp_path).metrics)] == [
        *range(1, told["step"] + 1)
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 4])
def test_short_steps_that_are_told_of_together_are_logged_as_one_by_one(tmp_path, ranks):
    """A callback that hears of each step has each told of alone. On four ranks the order of a sum matters."""
    together = train(tmp_path / "together", "regression", 80, ranks=ranks)
    alone = train(tmp_path / "alone", "regression", 80, "ends_at=1000", ranks=ranks)
    assert together == alone
    assert losses(tmp_path / "together") == losses(tmp_path / "alone")
    lines = list(read_json_lines(RunDir(tmp_path / "together").metrics))
    assert [line["step"] for line in lines] == [*range(1, 81)]
    assert all(before["time"] <= after["time"] for before, after in itertools.pairwise(lines))
    assert all(line["spent"]["all"] > 0 for line in lines)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_test_and_predict_see_every_sample_once_in_its_place(tmp_path, ranks):
    told = train(tmp_path, "regression", 3, ranks=ranks)
    module = Regression()
    nn.utils.vector_to_parameters(torch.tensor(told["state"][0]).double(), module.parameters())
    with torch.no_grad():
        expected, loss = module(samples()[0]), module.training_step(samples(), 0)
    assert told["predictions"] == pytest.approx(expected.flatten().tolist())
    assert told["test"] == pytest.approx({"test_loss": loss.item()})


@pytest.mark.ranks
def test_what_is_computed_again_changes_neither_gradients_nor_running_statistics(tmp_path):
    plain = train(tmp_path / "plain", "noisy", 5, "global_batch_size=8", ranks=2)
    again = train(tmp_path / "again", "noisy", 5, "global_batch_size=8", 'recompute=["body"]', ranks=2)
    assert again == plain


def test_activations_of_a_block_that_is_computed_again_are_not_kept():
    module, kept = Noisy(), []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    def all_kept() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module.training_step(samples(), 0)
        return sum(kept)

    plain = all_kept()
    with activation_checkpointing(module, ["body"]):
        assert all_kept() < plain / 2
    assert all_kept() == plain
    with pytest.raises(hpctrain.UserError, match=r"recompute contains 'bodies', but .* no such submodule"):
        activation_checkpointing(module, ["bodies"]).__enter__()
    with pytest.raises(hpctrain.UserError, match=r"'body.0' and also 'body', which contains it"):
        activation_checkpointing(module, ["body*", "body.*"]).__enter__()


@pytest.mark.ranks
def test_compiled_steps_train_the_same(tmp_path):
    plain = train(tmp_path / "plain", "regression", 4, ranks=2)
    compiled = train(tmp_path / "compiled", "regression", 4, 'compile={"backend": "eager"}', ranks=2)
    assert compiled["state"][0] == pytest.approx(plain["state"][0], rel=1e-12)
    with pytest.raises(hpctrain.UserError, match="Set only one"):
        hpctrain.Trainer(max_steps=1, compile=True, recompute=["body"])


@pytest.mark.ranks
@pytest.mark.parametrize("more", ["micro_batch_size=2", 'recompute=["body"]'])
def test_a_graph_that_is_promised_to_be_static_changes_nothing(tmp_path, more):
    plain = train(tmp_path / "plain", "regression", 7, more, ranks=2)
    for last_step in (3, 7):
        static = train(tmp_path / "static", "regression", last_step, more, "static_graph=true", ranks=2)
    assert static == plain
    for wrong in ({"strategy": "zero3"}, {"find_unused_parameters": True}):
        with pytest.raises(hpctrain.UserError, match="static_graph is True"):
            hpctrain.Trainer(max_steps=1, static_graph=True, **wrong)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "setting"), [("gan", "micro_batch_size=2"), ("regression", 'compile={"backend": "eager"}')]
)
def test_turns_and_compiled_steps_resume_to_the_bit(tmp_path, kind, setting):
    whole = train(tmp_path / "whole", kind, 7, setting, ranks=2)
    for last_step in (4, 7):
        parts = train(tmp_path / "parts", kind, last_step, setting, ranks=2)
    assert parts == whole
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_validation_step_that_fails_does_so_before_the_first_step():
    class Broken(Regression):
        steps = 0

        def training_step(self, batch, batch_idx):
            type(self).steps += 1
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hpctrain.Trainer(max_steps=3).fit(Broken(), samples(), samples())
    assert Broken.steps == 0


@pytest.mark.ranks
def test_a_sanity_check_changes_nothing(tmp_path):
    ways = [
        train(tmp_path / str(n), "noisy", 4, "validate_every=2", f"sanity_val_batches={n}") for n in (0, 2)
    ]
    assert ways[0] == ways[1]
    assert losses(tmp_path / "0") == losses(tmp_path / "2")


@pytest.mark.ranks
def test_rates_are_scaled_to_the_batch_and_warmed_up_beside_any_schedule(tmp_path):
    module = Regression()
    optimizer = module.configure_optimizers()
    for step, (number, batch) in enumerate(batches(5), 1):
        optimizer.param_groups[0]["lr"] = 0.1 * LrScaler(2.0, 4).factor(step)
        module.training_step(batch, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    for last_step in (2, 5):  # with a stop
        told = train(tmp_path, "regression", last_step, "lr_reference_batch_size=5", "warmup_steps=4")
    assert told["state"][0] == pytest.approx(state_of(module), rel=1e-9)


def test_factors_of_rates():
    assert [LrScaler(4.0, 3).factor(step) for step in (1, 2, 3, 9)] == [2.0, 3.0, 4.0, 4.0]
    assert [LrScaler(1.0, 4).factor(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    of = LrScaler.from_settings(
        hpctrain.Trainer(max_steps=1, global_batch_size=64, lr_reference_batch_size=16, lr_scaling="sqrt")
    )
    assert of == LrScaler(2.0)
    assert LrScaler.from_settings(hpctrain.Trainer(max_steps=1)) is None


def test_advice_about_data_workers():
    assert warn_too_many_workers(4, 4) is None
    assert "num_workers is 8, but each rank has only 4 CPUs" in (warn_too_many_workers(8, 4) or "")
    assert warn_too_few_workers(1.0, 100.0, 0, 8) is None
    assert warn_too_few_workers(9.0, 10.0, 0, 8) is None  # too early to tell
    assert "50% of the time" in (warn_too_few_workers(50.0, 100.0, 2, 8) or "")
    assert "try 4" in (warn_too_few_workers(50.0, 100.0, 2, 8) or "")
    assert "--cpus-per-task" in (warn_too_few_workers(50.0, 100.0, 8, 8) or "")


def test_progress_tells_samples_a_second():
    now = [0.0]
    pace = SampleRate(32, lambda: now[0])
    assert pace.rate_since_last(1) == ""
    now[0] = 0.5
    assert pace.rate_since_last(10) == ""
    now[0] = 2.0
    assert pace.rate_since_last(21) == "  320 samples/s"
