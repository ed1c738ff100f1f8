"""Arguments and indices of trials."""

import itertools

import pytest

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_array import MAX_TASKS
from hpctrain.sweeps.sweep_record import SweepRecord, read_sweep


def record(**fields) -> SweepRecord:
    defaults = {"args": ("--steps", "5"), "space": {"lr": "1,2", "name": ["a b", "c"]}, "folder": "/"}
    return SweepRecord(**{**defaults, **fields})


@pytest.mark.parametrize(
    ("form", "args"),
    [
        ("--{name} {value}", ("--lr", "1", "--name", "a b")),
        ("{name}={value}", ("lr=1", "name=a b")),
        ("-o {name}:{value}", ("-o", "lr:1", "-o", "name:a b")),
    ],
)
def test_arguments_of_a_trial(form, args):
    assert record(format=form).with_trials().trial_args(0) == ("--steps", "5", *args)


@pytest.mark.parametrize("form", ["--{name}", "{value", "{other} {value}", "{0} {value}"])
def test_invalid_formats_are_refused(form):
    with pytest.raises(UserError, match=r"not a valid argument format \(--as\)"):
        record(format=form)


def test_array_notation():
    assert record(concurrent=3).array(range(4)) == "0-3%3"
    assert record().array([5]) == "5"
    assert record().array([1, 4, 5]) == "1,4,5"


def test_record_is_restored_from_the_folder(tmp_path):
    run = RunDir(tmp_path)
    assert read_sweep(run) is None
    made = record(sampler="random", seed=3).with_trials(2)
    run.sweep.write_text(made.text())
    assert read_sweep(run) == made
    for damage in ("{", "{}", '{"args": 1}'):
        run.sweep.write_text(damage)
        with pytest.raises(UserError, match="Cannot read the sweep's record"):
            read_sweep(run)


def test_values_are_added_to_a_grid(tmp_path):
    (tmp_path / "names.txt").write_text("a b\n  # comment\nd\u2028e\n")
    made = record(space={"lr": "1,2", "name": "c", "seed": "0:2"}).with_trials()
    made = made.with_values({"lr": "2,3"}, tmp_path).with_trials()
    made = made.with_values({"name": "@names.txt"}, tmp_path).with_trials()
    (tmp_path / "names.txt").unlink()
    names, seeds = ["c", "a b", "d\u2028e"], ["0", "1"]
    assert made.space == {"lr": ["1", "2", "3"], "name": names, "seed": "0:2"}
    assert len(made.with_trials().trials) == 18
    every = {(trial["lr"], trial["name"], trial["seed"]) for trial in made.trials}
    assert every == set(itertools.product(["1", "2", "3"], names, seeds))


def test_too_many_trials_are_refused():
    made = record(sampler="random").with_trials(MAX_TASKS - 1)
    with pytest.raises(UserError, match=f"would have {MAX_TASKS + 1} trials"):
        made.with_trials(2)
    with pytest.raises(UserError, match="at most"):
        record(sampler="random").with_trials(10**9)
