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


def test_files_that_match_a_pattern_count_like_those_of_the_folder(tmp_path):
    folder, pattern = tmp_path / "checkpoints", f"{tmp_path}/out/**/*.pt"
    for name in ("out/old.pt", "out/log.txt", "other/model.pt", "checkpoints/a.pt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
        os.utime(tmp_path / name, (1000, 1000))
    watcher = ScriptCheckpointWatcher(folder, pattern)
    (tmp_path / "out/log.txt").write_text("12")
    (tmp_path / "other/model.pt").write_text("12")
    assert watcher.newest_since() is None
    (tmp_path / "out/epoch-3").mkdir()
    nested = tmp_path / "out/epoch-3/model.pt"
    nested.write_text("1")
    assert watcher.newest_since() == nested
    os.utime(nested, (2000, 2000))
    assert newest_script_checkpoint(folder, pattern) == (nested, 2000.0)
    os.utime(folder / "a.pt", (3000, 3000))
    assert newest_script_checkpoint(folder, pattern) == (folder / "a.pt", 3000.0)
    assert watcher.newest_since() == folder / "a.pt"
    (tmp_path / "out/old.pt").write_text("12")  # replaced in place
    assert watcher.newest_since() == tmp_path / "out/old.pt"
