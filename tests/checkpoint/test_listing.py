"""Detection of new files that a script writes into the run's `checkpoints` folder."""

import os

from hpctrain.checkpoint.io.checkpoint_dir import boot_identity, new_save_token, temporary_name
from hpctrain.checkpoint.listing import ScriptCheckpointWatcher, newest_script_checkpoint


def test_watcher_finds_new_and_rewritten_files(tmp_path):
    folder = tmp_path / "checkpoints"
    watcher = ScriptCheckpointWatcher(folder)
    assert watcher.newest_since() is None
    (folder / "step-100").mkdir(parents=True)
    (folder / "step-100" / "model.safetensors").write_text("1")
    assert watcher.newest_since() == folder / "step-100"
    watcher = ScriptCheckpointWatcher(folder)
    assert watcher.newest_since() is None
    os.utime(folder / "step-100" / "model.safetensors", (0, 0))  # rewritten, with an older time
    assert watcher.newest_since() == folder / "step-100"


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
