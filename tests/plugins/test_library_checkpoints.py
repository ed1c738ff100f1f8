"""Schedule of the checkpoints of other libraries."""

from pathlib import Path

import pytest

from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE
from hpctrain.training.saving import library_checkpoints as module


def test_checkpoint_that_is_due_between_two_decisions_is_saved_at_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "should_stop", lambda: False)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    checkpoints = module.LibraryCheckpoints("step", every_n_steps=4)
    decisions = [None, None, "save", None, "save", "save", None]
    assert [checkpoints.decide(step) for step in (2, 3, 5, 6, 8, 14, 15)] == decisions
    checkpoints.log_resumed(Path("step-6"))
    assert [checkpoints.decide(step) for step in (7, 8)] == [None, "save"]


def test_old_checkpoints_are_deleted_after_the_new_one_is_complete(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    checkpoints = module.LibraryCheckpoints("checkpoint", marker="complete")
    for step in (1, 2, 3, 4):
        (tmp_path / "checkpoints" / f"checkpoint-{step}").mkdir(parents=True)
        checkpoints.mark(step, keep_last=1, best="checkpoint-2")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]


def test_second_training_in_a_process_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    first, second = (module.LibraryCheckpoints("checkpoint") for _ in range(2))
    assert first.newest() is None
    assert first.newest() is None
    with pytest.raises(UserError, match="already trained with another object"):
        second.newest()
