"""Arguments and indices of trials."""

from __future__ import annotations

import pytest

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
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


def test_grid_is_extended_by_new_combinations():
    small = record().with_trials()
    large = record(space={**small.space, "lr": "2,3"}, trials=small.trials).with_trials()
    assert [trial["lr"] for trial in large.trials] == ["1", "1", "2", "2", "3", "3"]


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
