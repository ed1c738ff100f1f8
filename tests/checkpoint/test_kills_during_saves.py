"""Kills at a system call of a save: a valid checkpoint is always found, this one or the one before.

strace kills the process at the n-th system call of one kind in a thread. All kinds and all n together reach
every moment at which the files on disk can differ.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.commands import environment
from helpers.waiting import wait_for
from save_until_killed import LAST_STEP, state, store

from hpctrain.checkpoint.store import CheckpointStore

#: The system calls that change the files of a save on disk, or flush them.
CALLS = ("write", "openat", "close", "fsync", "mkdir", "rename", "unlinkat", "rmdir", "flock", "futex")
MODES = ("sync", "async", "tier")
SCRIPT = SCRIPTS / "save_until_killed.py"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    process = subprocess.Popen(
        [sys.executable, SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    )
    # Until it runs, it has no command line by which the leftover-process check recognizes it.
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(120)


def outcome_lines(folder: Path) -> list[str]:
    return (folder / "said").read_text().split() if (folder / "said").exists() else []


def kill_at_call(server: subprocess.Popen, folder: Path, mode: str, call: str, n: int) -> bool:
    """True if the n-th such call of a thread killed the saving process; False if it ended before."""
    folder.mkdir()
    server.stdin.write(f"{mode} {folder}\n")
    server.stdin.flush()
    pid = server.stdout.readline().strip()
    wait_for(lambda: "ready" in outcome_lines(folder), 30, "two checkpoints", interval=0.002)
    inject = f"inject={call}:signal=SIGKILL:when={n}"
    command = ["strace", "-f", "-p", pid, "-o", str(folder / "calls"), "-e", f"trace={call}", "-e", inject]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        try:
            line = strace.stderr.readline()
            if "attached" not in line:
                (folder / "go").touch()
                pytest.skip(f"strace may not attach here: {line.strip()}")
            (folder / "go").touch()
            strace.communicate(timeout=120)
        finally:
            strace.kill()
    assert int(pid) > 1
    return "end" not in outcome_lines(folder)


def check_restart(folder: Path, mode: str) -> None:
    saved_steps = [int(word) for word in outcome_lines(folder) if word.isdecimal()]
    reopened = store(mode, folder)
    loaded, broken = reopened.load_newest()
    assert loaded is not None, broken
    # At most one interval is lost: reported saves are there, and at most the one in flight is not.
    assert max(saved_steps) <= loaded.step <= max(saved_steps) + 1
    assert torch.equal(loaded.state["x"], state(loaded.step)["x"])
    assert loaded.state["step"] == loaded.step
    assert broken == [], "a save that was killed looked like a broken checkpoint"
    reopened.save(loaded.step + 1, state(loaded.step + 1), {})
    assert reopened.load_newest()[0].step == loaded.step + 1
    reopened.close(clean=True)
    assert [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")] == []


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("call", "n"), [("write", 1), ("rename", 1), ("fsync", 3), ("unlinkat", 1), ("rmdir", 1)]
)
def test_kill_at_system_call_leaves_valid_checkpoint(server, tmp_path, mode, call, n):
    assert kill_at_call(server, tmp_path / "run", mode, call, n) or mode != "sync"
    check_restart(tmp_path / "run", mode)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_kill_at_every_system_call_leaves_valid_checkpoint(server, tmp_path):
    """More than 200 kills, in the order of the calls."""
    kills = 0
    for mode, call in itertools.product(MODES, CALLS):
        for n in itertools.count(1):
            folder = tmp_path / f"{mode}-{call}-{n}"
            killed = kill_at_call(server, folder, mode, call, n)
            check_restart(folder, mode)
            shutil.rmtree(folder)
            kills += killed
            if not killed or n > 60:
                break
    print(f"killed {kills} times")
    assert kills > 200


@pytest.mark.slow
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_disk_that_hangs_fails_saves_and_recovers(server, tmp_path, call):
    """Each such call takes four seconds; a save is reported as failed before it returns."""
    server.stdin.write(f"for-long {tmp_path}\n")
    server.stdin.flush()
    pid = server.stdout.readline().strip()

    def outcomes(begin: int) -> list[str]:
        lines = (tmp_path / "said").read_text().splitlines()[begin:]
        return [line.partition(" ")[2] for line in lines]

    try:
        wait_for(lambda: (tmp_path / "said").exists() and outcomes(2), 30, "three checkpoints")
        command = ["strace", "-f", "-p", pid, "-o", str(tmp_path / "calls"), "-e", f"trace={call}"]
        command += ["-e", f"inject={call}:delay_enter=4000000"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            try:
                if "attached" not in (line := strace.stderr.readline()):
                    pytest.skip(f"strace may not attach here: {line.strip()}")
                before = len(outcomes(0)) + 1
                wait_for(lambda: len(outcomes(before)) >= 2, 30, "two saves on a disk that hangs")
            finally:
                strace.kill()
        hung = outcomes(before)[:2]
        command = (
            "the disk has not made progress for 0.3 s",
            "an earlier save is still waiting for the disk",
        )
        assert all(any(some in outcome for some in command) for outcome in hung), hung
        wait_for(lambda: outcomes(-1) == ["saved"], 30, "a checkpoint once the disk goes on")
    finally:
        (tmp_path / "stop").touch()
        wait_for(lambda: not Path(f"/proc/{pid}").exists(), 30, "the end of the process that saves")
    loaded, broken = CheckpointStore(tmp_path / "checkpoints").load_newest()
    assert broken == []
    assert torch.equal(loaded.state["x"], state(loaded.step)["x"])
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []


@pytest.mark.slow
def test_all_steps_are_saved_without_a_kill(server, tmp_path):
    assert not kill_at_call(server, tmp_path / "run", "async", "reboot", 1)
    assert re.findall(r"\d+", " ".join(outcome_lines(tmp_path / "run"))) == [
        str(s) for s in range(1, LAST_STEP + 1)
    ]
