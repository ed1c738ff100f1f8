"""Whether a script's own files in the run's `checkpoints` folder count as new."""

from __future__ import annotations

import os

from hpctrain.checkpoint.place import hidden_name, new_token, this_machine
from hpctrain.supervisor.script_checkpoints import ScriptCheckpoints


def test_nothing_new(tmp_path):
    assert ScriptCheckpoints(tmp_path / "none").newest_since() is None
    (tmp_path / "last.ckpt").write_text("1")
    assert ScriptCheckpoints(tmp_path).newest_since() is None


def test_a_new_file(tmp_path):
    before = ScriptCheckpoints(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-100" / "model.safetensors").write_text("1")
    assert before.newest_since() == tmp_path / "checkpoints" / "step-100" / "model.safetensors"


def test_a_file_written_anew_even_by_a_clock_that_is_behind(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("1")
    before = ScriptCheckpoints(tmp_path)
    os.utime(path, (0, 0))
    assert before.newest_since() == path


def test_a_file_that_is_gone_is_no_checkpoint(tmp_path):
    (tmp_path / "last.ckpt").write_text("1")
    before = ScriptCheckpoints(tmp_path)
    (tmp_path / "last.ckpt").unlink()
    assert before.newest_since() is None


def test_the_trainers_own_are_told_by_it_with_their_steps(tmp_path):
    before = ScriptCheckpoints(tmp_path)
    saving = hidden_name(200, this_machine(), new_token())
    deleting = saving.replace("saving", "deleting")
    for name in ("step-00000100", saving, deleting, "step-00000050.broken-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("1")
    assert before.newest_since() is None
