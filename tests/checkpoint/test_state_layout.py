"""Layout of tensors and values in a checkpoint, across changing states and failed saves."""

import errno
import os

import pytest
import torch
from helpers.saved_states import equal

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError


def test_failed_commit_does_not_affect_the_next_save(tmp_path, monkeypatch):
    """Rank 0 has received the layout of the failed save; the next state looks like the one before."""
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
def test_colliding_names_keep_their_own_values(tmp_path, state):
    store = CheckpointStore(tmp_path)
    store.save(1, state, {})
    assert equal(store.load_newest()[0].state, state)


def test_cached_plan_is_dropped_when_shapes_or_names_change(tmp_path):
    """Shapes, types and names count; the plan of an equal layout is reused."""
    store = CheckpointStore(tmp_path)
    states = [
        {"x": torch.zeros(2, 3), "y": torch.ones(4)},
        {"x": torch.full((2, 3), 7.0), "y": torch.ones(4)},
        {"x": torch.zeros(3, 2), "y": torch.ones(4)},
        {"x": torch.zeros(3, 2).half(), "y": torch.ones(4)},
        {"z": torch.zeros(3, 2).half(), "y": torch.arange(4.0)},
        {"z": torch.zeros(2, 3).half().t(), "y": torch.nn.Parameter(torch.ones(4))},
    ]
    for step, state in enumerate(states, 1):
        store.save(step, state, {"own": torch.tensor([step])})
        loaded = store.load_newest()[0]
        assert all(torch.equal(loaded.state[name], state[name]) for name in state)
        assert loaded.rank_state["own"].tolist() == [step]
    with pytest.raises(CheckpointError, match="sparse_coo"):
        store.save(7, {"z": torch.zeros(3, 2).half().to_sparse(), "y": torch.ones(4)}, {"own": torch.ones(1)})
