"""A user's own loop with `session` has the Trainer's data order, weights, checkpoints and stop."""

from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from test_exact_gradients import train_manually, trained_samples
from test_trainer import losses, run_script

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "train_in_float64.py"


def train(run: Path, last_step: int, stop_at: str = "", *, ranks: int = 1) -> dict:
    result = run_script(SCRIPT, run, last_step, 5, f"own_loop={stop_at}", ranks=ranks)
    assert all(parameters == result["parameters"][0] for parameters in result["parameters"])
    return result


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_parameters_are_those_of_one_process_with_the_whole_batch(tmp_path, ranks):
    """A batch of 5 on 3 ranks is shared 2, 2, 1, and the epoch's last one of 3 evenly."""
    result = train(tmp_path, 7, ranks=ranks)
    assert result["parameters"][0] == pytest.approx(train_manually(7, 5), rel=1e-9)
    lines = read_json_lines(RunDir(tmp_path).metrics)
    assert [line["step"] for line in lines] == [*range(1, 8)]
    assert all(line["lr"] > 0 for line in lines)


@pytest.mark.ranks
def test_stop_of_one_rank_saves_and_the_run_resumes_bitwise(tmp_path):
    uninterrupted = train(tmp_path / "whole", 12, ranks=2)
    with pytest.raises(AssertionError, match="exit code 75 of rank"):
        train(tmp_path / "parts", 12, "1:6", ranks=2)
    resumed = train(tmp_path / "parts", 12, ranks=2)
    assert 0 < resumed["steps"] < 12
    assert resumed["parameters"] == uninterrupted["parameters"]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert trained_samples(tmp_path / "parts") == trained_samples(tmp_path / "whole")


@pytest.mark.ranks
def test_session_resumes_on_another_number_of_ranks(tmp_path):
    for last_step, ranks in ((4, 2), (7, 3), (9, 1)):
        result = train(tmp_path, last_step, ranks=ranks)
    assert result["parameters"][0] == pytest.approx(train_manually(9, 5), rel=1e-9)


@pytest.mark.parametrize("ending", ["end", "break"])
def test_loop_that_ends_early_saves_or_warns(tmp_path, capfd, ending):
    with hpctrain.session(seed=1, run_dir=tmp_path) as s:
        model = torch.nn.Linear(1, 1)
        model, optimizer = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in s.batches(torch.randn(40, 1), global_batch_size=4, max_steps=1000):
            loss = model(batch).pow(2).mean()
            s.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.log(loss=loss)
            if s.step == 5:
                if ending == "break":
                    break
                s.end()
    run = RunDir(tmp_path)
    warned = "ended early, in step 6" in capfd.readouterr().out
    if ending == "end":
        steps = [line["step"] for line in read_json_lines(run.metrics)]
        assert 6 <= s.step <= 24
        assert steps == [*range(1, s.step + 1)]
        assert [path.name for path in run.checkpoints.glob("step-*")] == [f"step-{s.step:08}"]
        assert not warned
    else:
        assert warned
        assert not list(run.checkpoints.glob("step-*"))


def test_wrong_order_of_calls_is_refused():
    with pytest.raises(hpctrain.UserError, match="no option 'precison'"), hpctrain.session(precison="32"):
        pass
    data = torch.zeros(4, 1)
    with hpctrain.session() as s:
        with pytest.raises(hpctrain.UserError, match="has received no optimizer"):
            next(iter(s.batches(data, global_batch_size=2, max_steps=1)))
        with pytest.raises(hpctrain.UserError, match="received an object of type dict"):
            s.prepare({})
        with pytest.raises(hpctrain.UserError, match="before the loop"):
            s.log(loss=1.0)
        model = torch.nn.Linear(1, 1)
        prepared = s.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert prepared[0] is model  # a single process has nothing to share
        assert len(list(s.batches(data, global_batch_size=2, max_steps=3))) == 3
        with pytest.raises(hpctrain.UserError, match="called after batches"):
            s.prepare(model)
        with pytest.raises(hpctrain.UserError, match="called twice"):
            next(iter(s.batches(data, global_batch_size=2, max_steps=3)))
