"""The supervisor on a full or missing disk: it buffers writes in memory and flushes them later."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.disks import mounted_disk
from helpers.waiting import slowness, wait_for

from hpctrain.errors import HpctrainError
from hpctrain.rundir import RunDir
from hpctrain.supervisor import buffered_storage
from hpctrain.supervisor.buffered_storage import BufferedLogHandler, BufferedStorage
from hpctrain.supervisor.run_end import finish_run


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    monkeypatch.setattr(buffered_storage, "_RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(buffered_storage, "_VANISHED_LIMIT_S", 0.2)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB."""
    with mounted_disk(tmp_path / "disk", "size=256k,nr_inodes=12") as folder:
        yield folder


def fill(disk: Path) -> None:
    """Leave space for no byte and no file."""
    with open(disk / "filler", "ab", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    for number in range(20):
        try:
            (disk / f"filler-{number}").touch()
        except OSError:
            return
    raise AssertionError("there is always room for another file")


def free(disk: Path) -> None:
    for path in disk.glob("filler*"):
        path.unlink()


def kinds(run: RunDir) -> list[str]:
    return [event.kind for event in run.read_events()]


def test_writes_to_a_full_disk_are_buffered_and_flushed_later(disk):
    run = RunDir(disk, BufferedStorage(disk))
    run.spec.touch()
    assert run.new_attempt() == 0
    run.log_event("started", 0)
    before = run.events.stat().st_size
    fill(disk)
    for i in range(300):
        run.log_event("failure", 0, rank=i, cause="x" * 100)
    run.write(run.failure(0, 0), "how")
    assert run.new_attempt() == 1
    assert run.new_attempt() == 2
    assert run.attempts() == [0, 1, 2]
    assert kinds(run) == ["started"] + ["failure"] * 300, "what waits counts"
    assert len(kinds(RunDir(disk))) < 100, "the disk was full"
    assert "disk full at" in str(run.storage.pending_reason)
    free(disk)
    wait_for(lambda: len(kinds(RunDir(disk))) == 301, 10, "what waits to be written")
    wait_for(run.failure(0, 0).exists, 10, "the file that waits")
    assert run.storage.pending_reason is None
    assert run.events.stat().st_size > before


def test_failed_run_on_a_full_disk_prints_its_end_after_a_limit(disk, capsys):
    run = RunDir(disk, BufferedStorage(disk))
    fill(disk)
    run.log_event("started", 0)
    finish_run(run, "FAILED", "rank 1 died")
    start = time.monotonic()
    run.storage.flush_pending(0.3)
    assert time.monotonic() - start < 40 * slowness()
    printed = [
        line.partition(": {")[2] for line in capsys.readouterr().err.splitlines() if '"finished"' in line
    ]
    assert json.loads("{" + printed[0])["cause"].startswith("rank 1 died; disk full at ")


def test_log_is_buffered(disk, capsys):
    handler = BufferedLogHandler(disk / "supervisor.log")
    fill(disk)
    for i in range(3):
        handler.emit(logging.makeLogRecord({"msg": f"line {i}"}))
    assert "supervisor.log: No space left" in capsys.readouterr().err
    free(disk)
    handler.lines.flush()
    assert (disk / "supervisor.log").read_text() == "line 0\nline 1\nline 2\n"


def test_missing_folder_ends_the_run_and_is_not_created(tmp_path):
    run = RunDir(tmp_path / "run", BufferedStorage(tmp_path / "run"))
    with pytest.raises(HpctrainError, match="no longer exists"):
        run.new_attempt()
    assert not run.path.exists()
