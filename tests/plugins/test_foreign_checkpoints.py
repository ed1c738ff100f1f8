"""Schedule of the checkpoints of other libraries."""

from __future__ import annotations

from pathlib import Path

from hpctrain.rundir import RUN_DIR_VARIABLE
from hpctrain.training.saving import foreign_checkpoints as module


def test_checkpoint_that_is_due_between_two_decisions_is_saved_at_the_second(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "should_stop", lambda: False)
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    checkpoints = module.ForeignCheckpoints("step", every_n_steps=4)
    decisions = [None, None, "save", None, "save", "save", None]
    assert [checkpoints.decide(step) for step in (2, 3, 5, 6, 8, 14, 15)] == decisions
    checkpoints.log_resumed(Path("step-6"))
    assert [checkpoints.decide(step) for step in (7, 8)] == [None, "save"]
