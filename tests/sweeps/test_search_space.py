"""Values of hyper-parameters, grids and random trials."""

import math

import pytest

from hpctrain.errors import UserError
from hpctrain.sweeps.search_space import ValueRange, draw_trials, grid, parse_space


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4, adam", ["1e-4", "3e-4", "adam"]),
        ("7", ["7"]),
        ("a,b,a", ["a", "b"]),
        ("0:3", ["0", "1", "2"]),
        ("8:0:-4", ["8", "4"]),
        ("16:9:00", None),
        ("s3://bucket,gs://bucket", ["s3://bucket", "gs://bucket"]),
        ("0..5", ValueRange(0, 5, is_integer=True)),
        ("1e-5..0.1", ValueRange(1e-5, 0.1)),
        ("log:1e-5..0.1", ValueRange(1e-5, 0.1, is_log=True)),
        ("log:1..1000", ValueRange(1, 1000, is_log=True, is_integer=True)),
        (["a,b", "../x..y"], ["a,b", "../x..y"]),
        ("3:3", None),
        ("a,,b", None),
        ("5..1", None),
        ("log:0..1", None),
        ("a..b", None),
        ("0:100000", None),
    ],
)
def test_values_are_parsed(tmp_path, text, values):
    if values is None:
        with pytest.raises(UserError, match=r"--over x=.* Examples: "):
            parse_space({"x": text}, tmp_path)
    else:
        assert parse_space({"x": text}, tmp_path) == {"x": values}


def test_values_from_a_file(tmp_path):
    (tmp_path / "v.txt").write_text("# prompts\none, two\n\n three \n")
    assert parse_space({"x": "@v.txt"}, tmp_path) == {"x": ["one, two", "three"]}
    with pytest.raises(UserError, match=r"Cannot read the values of x from .*w\.txt.*No such file"):
        parse_space({"x": "@w.txt"}, tmp_path)


def test_names_are_checked(tmp_path):
    assert list(parse_space({"model.lr": "1", "data/set@x": "1"}, tmp_path)) == ["model.lr", "data/set@x"]
    with pytest.raises(UserError, match="'a b' is not a valid hyper-parameter name"):
        parse_space({"a b": "1"}, tmp_path)


def test_grid_has_all_combinations():
    trials = grid({"lr": ["1", "2"], "seed": ["0", "1", "2"]})
    assert [tuple(trial.values()) for trial in trials][:4] == [("1", "0"), ("1", "1"), ("1", "2"), ("2", "0")]
    assert len(trials) == 6
    with pytest.raises(UserError, match="x is a range"):
        grid({"x": ValueRange(0, 1)})
    with pytest.raises(UserError, match="1000000 trials"):
        grid({"x": list(map(str, range(1000))), "y": list(map(str, range(1000)))})


def test_random_trials_depend_on_seed_and_number_only():
    space = {
        "lr": ValueRange(1e-5, 0.1, is_log=True),
        "n": ValueRange(1, 3, is_integer=True),
        "opt": ["a", "b"],
    }
    trials = draw_trials(space, range(200), seed=1)
    assert draw_trials(space, range(150, 200), seed=1) == trials[150:]
    assert draw_trials(space, range(5), seed=2) != trials[:5]
    rates = [float(trial["lr"]) for trial in trials]
    assert 1e-5 <= min(rates) < 1e-4 < 1e-2 < max(rates) <= 0.1
    assert abs(sum(map(math.log10, rates)) / 200 + 3) < 0.3
    assert {trial["n"] for trial in trials} == {"1", "2", "3"}
    assert {trial["opt"] for trial in trials} == {"a", "b"}
