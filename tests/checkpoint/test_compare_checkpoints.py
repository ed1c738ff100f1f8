"""Comparison of checkpoints, bit by bit."""

import pytest
import torch
from helpers.rank_checkpoints import open_store
from helpers.ranks import run_on_ranks
from helpers.saved_states import STATE, save

from hpctrain.checkpoint.convert.compare_checkpoints import (
    MISSING,
    UNREADABLE,
    StateComparison,
    compare_checkpoints,
)
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CorruptCheckpoint


def compare(folder, one, other, rank_states=({}, {}), ignored=()) -> StateComparison:
    for name, state, rank_state in zip("ab", (one, other), rank_states, strict=True):
        CheckpointStore(folder / name).save(1, state, rank_state)
    return compare_checkpoints(*(folder / name / "step-00000001" for name in "ab"), ignored=ignored)


def test_equal_states_with_every_kind_of_value_are_identical(tmp_path):
    for name in "ab":
        save(CheckpointStore(tmp_path / name), 1)
    result = compare_checkpoints(*(tmp_path / name / "step-00000001" for name in "ab"))
    assert result.differences == []
    assert result.num_tensors == 7
    assert result.num_values > 5
    assert "transposed" in STATE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_single_flipped_bit_is_found_in_each_type(dtype, tmp_path):
    one, other = (torch.zeros(3, 5, dtype=dtype) for _ in range(2))
    other[1, 2] = torch.ones((), dtype=torch.uint8).view(torch.bool) if dtype == torch.bool else 0
    raw = other.view(torch.uint8).view(3, 5, -1)
    raw[1, 2, 0] = 1
    (found,) = compare(tmp_path, {"x": one}, {"x": other}).differences
    assert (found.name, found.index, found.bit) == ("x", (1, 2), 0)
    assert (found.num_different, found.num_elements) == (1, 15)


def test_bits_are_compared_not_values(tmp_path):
    nan, zero = torch.tensor(float("nan")), torch.tensor(0.0)
    assert compare(tmp_path / "nan", {"x": nan}, {"x": nan}).differences == []
    (found,) = compare(tmp_path / "zero", {"x": zero}, {"x": -zero}).differences
    assert (found.index, found.bit) == ((), 31)


def test_module_comes_first_and_other_shapes_types_and_names_differ(tmp_path):
    one = {"optimizers": torch.zeros(2), "module": {"a": torch.zeros(2), "b": torch.zeros(2)}, "lr": 0.1}
    other = {"optimizers": torch.ones(2), "module": {"a": torch.zeros(3), "c": torch.zeros(2)}, "lr": 0.2}
    found = compare(tmp_path, one, other).differences
    assert [each.name for each in found[:4]] == ["module/a", "module/b", "module/c", "optimizers"]
    assert [each.recorded for each in found[:3]] == ["float32 of shape [2]", "float32 of shape [2]", MISSING]
    assert (found[3].num_different, found[3].bit) == (2, None)
    assert [(each.name, each.recorded, each.here) for each in found if each.name == "lr"] == [
        ("lr", 0.1, 0.2)
    ]


def test_random_state_of_a_rank_is_compared_and_ignored_entries_are_not(tmp_path):
    states = {"torch": torch.tensor([1, 2])}, {"torch": torch.tensor([1, 3])}
    one, other = {"time": 1.0, "t": {"x": torch.zeros(1)}}, {"time": 2.0, "t": {"x": torch.ones(1)}}
    (found,) = compare(tmp_path, one, other, states, ignored=("time", "t")).differences
    assert (found.name, found.index, found.recorded, found.here) == ("rank-00000/torch", (1,), 2, 3)


def test_unreadable_tensors_are_named(tmp_path):
    states = {"x": torch.zeros(3), "y": torch.zeros(4)}
    assert compare(tmp_path, states, states).differences == []
    (tmp_path / "a" / "step-00000001" / "__0_0.distcp").unlink()
    found = compare_checkpoints(*(tmp_path / name / "step-00000001" for name in "ab")).differences
    assert [each.name for each in found] == ["x", "y"]
    assert (found[0].recorded, found[0].here) == (UNREADABLE, "readable")
    (tmp_path / "a" / "step-00000001" / "tensors.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        compare_checkpoints(*(tmp_path / name / "step-00000001" for name in "ab"))


def save_on_rank(folder, name: str, value: float) -> None:
    big = torch.zeros(512, 1024)
    big[400, 3] = value
    store = open_store(folder / name)
    store.save(1, {"big": big}, {"rng": torch.tensor([7])})
    store.close()


@pytest.mark.ranks
def test_rank_that_stored_the_element_is_named_for_any_number_of_ranks(tmp_path):
    run_on_ranks(save_on_rank, tmp_path, "two", 0.0, world_size=2)
    run_on_ranks(save_on_rank, tmp_path, "three", 1.0, world_size=3)
    folders = [tmp_path / name / "step-00000001" for name in ("two", "three")]
    (found,) = compare_checkpoints(*folders).differences
    assert (found.index, found.rank) == ((400, 3), 1)
