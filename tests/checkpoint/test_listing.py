"""Detection of new files that a script writes into the run's `checkpoints` folder."""

from __future__ import annotations

import os

from hpctrain.checkpoint.io.checkpoint_dir import boot_identity, new_save_token, temporary_name
from hpctrain.checkpoint.listing import ScriptCheckpointWatcher, newest_script_checkpoint


def test_watcher_finds_nothing_without_new_files(tmp_path):
    assert ScriptCheckpointWatcher(tmp_path / "none").newest_since() is None
    (tmp_path / "last.ckpt").write_text("1")
    assert ScriptCheckpointWatcher(tmp_path).newest_since() is None


def test_watcher_finds_new_file(tmp_path):
    before = ScriptCheckpointWatcher(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step-100").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-100" / "model.safetensors").write_text("1")
    assert before.newest_since() == tmp_path / "checkpoints" / "step-100"


def test_watcher_finds_rewritten_file_with_older_time(tmp_path):
    path = tmp_path / "last.ckpt"
    path.write_text("1")
    before = ScriptCheckpointWatcher(tmp_path)
    os.utime(path, (0, 0))
    assert before.newest_since() == path


def test_watcher_ignores_checkpoints_of_the_trainer(tmp_path):
    before = ScriptCheckpointWatcher(tmp_path)
    saving = temporary_name(200, boot_identity(), new_save_token())
    deleting = saving.replace("saving", "deleting")
    for name in ("step-00000100", saving, deleting, "step-00000050.broken-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("1")
    assert before.newest_since() is None


def test_newest_entry_is_returned_with_its_time(tmp_path):
    assert newest_script_checkpoint(tmp_path / "none") is None
    for name, seconds in (("old.ckpt", 1000), ("new.ckpt", 2000)):
        (tmp_path / name).write_text("1")
        os.utime(tmp_path / name, (seconds, seconds))
    assert newest_script_checkpoint(tmp_path) == (tmp_path / "new.ckpt", 2000.0)
