"""What lies where in a checkpoint, through changes of the state and saves that fail in between."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from helpers.saved_states import equal

from hpctrain.checkpoint.format.state_tree import split_tree
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError


def test_a_save_that_failed_at_its_last_moment_leaves_no_trace_in_the_next(tmp_path, monkeypatch):
    """The layout of its files was told to rank 0 already; the next state looks like the one before again."""
    store = CheckpointStore(tmp_path)
    first, other = ({"x": torch.ones(n), "y": torch.arange(5.0)} for n in (3, 1000))
    store.save(1, first, {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointDir, "commit", full)
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(2, other, {})
    store.save(3, first, {})
    loaded, broken = store.load_newest()
    assert (loaded.step, broken) == (3, [])
    assert equal(loaded.state, first)


@pytest.mark.parametrize(
    "state",
    [
        {"a/b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}},
        {1: torch.tensor(1.0), "1": torch.tensor(2.0)},
        {"a": [torch.tensor(1.0)], "a/0": torch.tensor(2.0), "a/0+": torch.tensor(3.0)},
        {False: [torch.zeros(2)], "False": [torch.ones(2)]},
    ],
)
def test_names_that_meet_in_one_path_do_not_take_each_others_values(tmp_path, state):
    store = CheckpointStore(tmp_path)
    store.save(1, state, {})
    assert equal(store.load_newest()[0].state, state)


def test_paths_are_as_before_where_none_meet():
    _, tensors = split_tree({"a": {"b": torch.zeros(1)}, "c": [torch.zeros(1)]}, "state")
    assert list(tensors) == ["state/a/b", "state/c/0"]


def test_what_is_known_of_a_states_looks_is_forgotten_when_they_change(tmp_path):
    """Shapes, types and names; the same looks are not worked out anew."""
    store = CheckpointStore(tmp_path)
    states = [
        {"x": torch.zeros(2, 3), "y": torch.ones(4)},
        {"x": torch.full((2, 3), 7.0), "y": torch.ones(4)},
        {"x": torch.zeros(3, 2), "y": torch.ones(4)},
        {"x": torch.zeros(3, 2).half(), "y": torch.ones(4)},
        {"z": torch.zeros(3, 2).half(), "y": torch.arange(4.0)},
        {"z": torch.zeros(2, 3).half().t(), "y": torch.nn.Parameter(torch.ones(4))},
    ]
    known = []
    for step, state in enumerate(states, 1):
        store.save(step, state, {"own": torch.tensor([step])})
        known.append(store._stager._cached_plan)
        loaded = store.load_newest()[0]
        assert all(torch.equal(loaded.state[name], state[name]) for name in state)
        assert loaded.rank_state["own"].tolist() == [step]
    assert [known[i] is known[i + 1] for i in range(5)] == [True, False, False, False, True]
    with pytest.raises(CheckpointError, match="sparse_coo"):
        store.save(7, {"z": torch.zeros(3, 2).half().to_sparse(), "y": torch.ones(4)}, {"own": torch.ones(1)})
