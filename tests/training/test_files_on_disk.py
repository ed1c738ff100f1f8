"""Files of a training: order of writes, and permissions."""

import json
import os
from pathlib import Path

from test_training_checkpoints import fit, steps

from hpctrain.rundir import RunDir


def test_metrics_are_on_disk_before_the_checkpoint_is_committed(tmp_path, monkeypatch):
    run = RunDir(tmp_path / "run")
    synced: dict[Path, str] = {}
    on_disk: dict[int, str] = {}
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def record_fsync(fd: int) -> None:
        fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").resolve()
        order.append(str(path))
        if path.is_file():
            synced[path] = path.read_text(errors="replace")

    def record_rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".saving-"):
            on_disk[int(target.name.partition("-")[2])] = synced.get(run.metrics.resolve(), "")
            assert run.events.resolve() in synced or not run.events.exists()
            order.append("commit")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    fit(run.path, max_steps=8, checkpoint_every=2)
    assert sorted(on_disk) == [2, 4, 6, 8]
    for step, text in on_disk.items():
        assert [json.loads(line)["step"] for line in text.splitlines()][:step] == list(range(1, step + 1))
    last = len(order) - 1 - order[::-1].index("commit")
    # The names of the records in the run folder, and then the name of the checkpoint.
    assert order[last - 1 : last + 2] == [str(run.path.resolve()), "commit", str(run.checkpoints.resolve())]
    assert steps(run.path)[-1] == 8


def test_run_without_a_submission_is_writable_by_its_owner_only(tmp_path):
    before = os.umask(0o002)
    try:
        fit(tmp_path / "run", max_steps=2, checkpoint_every=1)
    finally:
        os.umask(before)
    entries = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert [path for path in entries if path.stat().st_mode & 0o022] == []
