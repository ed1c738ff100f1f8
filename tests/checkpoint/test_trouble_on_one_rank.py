"""What one rank meets and the others do not: all are told alike, and none waits for another in vain."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from helpers.fork_server import run_forked
from helpers.saved_states import steps

from hpctrain.checkpoint.io import checkpoint_dir
from hpctrain.checkpoint.store import CheckpointStore

SCRIPT = Path(__file__).with_name("trouble_on_ranks.py")


def on_ranks(scenario: str, folder: Path) -> None:
    run_forked(SCRIPT, [scenario, str(folder)], {}, ranks=2, timeout=40)


@pytest.mark.parametrize(
    "scenario",
    [
        "a_folder_that_cannot_be_looked_through",
        "a_tier_that_cannot_be_looked_through",
        "a_tier_that_is_lost_between_two_saves",
        "copying_that_fails_on_one_by_a_fake",
        "telling_of_a_copy_fails_by_a_fake",
        "copying_that_has_ended_by_a_fake",
    ],
)
def test_two_ranks(tmp_path, scenario):
    on_ranks(scenario, tmp_path)


def test_a_tier_that_has_lost_its_manifests(tmp_path):
    on_ranks("only_in_the_tier", tmp_path)
    on_ranks("manifests_that_a_power_cut_took", tmp_path)


def test_a_folder_in_which_nothing_can_be_looked_for_by_a_fake(tmp_path, monkeypatch):
    """The new checkpoint is there; that no old one could be deleted is said beside it."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": torch.zeros(2)}, {})

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_dir, "list_checkpoint_steps", unreadable)
        saved = store.save(2, {"x": torch.zeros(2)}, {})
    assert saved.step == 2
    assert "Input/output error" in saved.notes[0]
    assert steps(tmp_path) == [1, 2]
