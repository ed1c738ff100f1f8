"""Full disks and vanished folders while real ranks train: the run goes on and says so."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.disks import mounted_disk
from helpers.fork_server import run_forked
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run
from helpers.waiting import wait_for

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.errors import RunFailed
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "train_on_failing_disk.py"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    with mounted_disk(tmp_path / "disk", "size=4m") as folder:
        yield folder


def train(run: RunDir, last_step: int, actions: dict[int, str], **more: str) -> str:
    run.path.mkdir(exist_ok=True)
    env = more | {"HPCTRAIN_RUN_DIR": str(run.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_forked(SCRIPT, [str(last_step), json.dumps(actions)], env, ranks=2)


def submit(disk: Path, last_step: int, actions: dict[int, str], *more: str, width: int = 64) -> Run:
    """A run of two ranks whose folder is on the disk that there is trouble with."""
    run = Run(disk / "run", {"WIDTH": str(width)})
    options = [
        "--backend",
        "local",
        "--no-code-snapshot",
        "--ntasks-per-node",
        "2",
        "--run-dir",
        str(run.path),
        *more,
    ]
    run.hpctrain("submit", *options, str(SCRIPT), str(last_step), json.dumps(actions))
    return run


def failures(run: RunDir) -> list[str]:
    return [event["cause"] for event in run.read_events() if event["kind"] == "failure"]


def assert_complete(run: RunDir, last_step: int) -> None:
    """Every step is on record, each once, and what is kept is whole and ends with the last step."""
    assert [record["step"] for record in read_json_lines(run.metrics)] == list(range(1, last_step + 1))
    listed, _ = list_checkpoints(run, verify=True)
    assert [one.problems for one in listed] == [()] * len(listed)
    assert listed[-1].step == last_step
    assert not [path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-")]


def test_a_full_disk_is_said_and_survived_and_nothing_is_lost(small_disk):
    run = RunDir(small_disk / "run")
    said = train(run, 60, {10: "fill", 40: "free"})
    assert "in step 60" in said
    assert any("No space left" in cause for cause in failures(run))
    assert "Training continues; earlier checkpoints are intact" in said
    assert f"cannot write {run.metrics}: " in said
    assert "metrics.jsonl is writable again; all buffered lines have been written" in said
    assert_complete(run, 60)


def test_a_checkpoint_before_the_full_disk_is_what_a_killed_run_goes_on_from(small_disk):
    run = RunDir(small_disk / "run")
    with pytest.raises(AssertionError, match=r"DiskFull.*no space for the checkpoint of step 20"):
        # The result itself does not fit: that ends the run.
        train(run, 20, {10: "fill"}, ROOM_LIMIT_S="0.5")
    (small_disk / "filler").unlink()
    listed, _ = list_checkpoints(run, verify=True)
    assert any(one.newest and one.step <= 10 for one in listed)
    assert f"resumed after step {listed[-1].step} " in train(run, 20, {})
    assert list_checkpoints(run, verify=True)[0][-1].step == 20


def test_a_disk_that_turns_read_only_is_reported_and_survived(small_disk):
    run = RunDir(small_disk / "run")
    said = train(run, 60, {10: "protect", 40: "unprotect"})
    assert "in step 60" in said
    assert any("Read-only file system" in cause for cause in failures(run))
    assert "Training continues; earlier checkpoints are intact." in said
    assert_complete(run, 60)


def test_checkpoints_that_vanish_are_said_and_the_run_goes_on(tmp_path):
    run = RunDir(tmp_path / "run")
    said = train(run, 40, {11: "hide"})
    assert "has vanished, together with its checkpoints." in said
    assert any("has vanished" in cause for cause in failures(run))
    assert_complete(run, 40)


def test_a_file_in_the_place_of_the_checkpoints_is_said_and_the_run_goes_on(tmp_path):
    run = RunDir(tmp_path / "run")
    said = train(run, 40, {11: "wreck", 25: "repair"})
    assert "Training continues; earlier checkpoints are intact" in said
    assert failures(run)
    assert_complete(run, 40)
    assert sorted(path.name for path in (run.path / "elsewhere").iterdir()), "what was there is untouched"


@pytest.mark.long
def test_a_job_on_a_full_disk_ends_well(small_disk):
    """With a supervisor and logs on the same disk: printing to them harms nobody, either."""
    run = submit(small_disk, 80, {20: "fill", 60: "free"})
    assert run.wait() == 0
    assert any("No space left" in cause for cause in failures(run.dir))
    assert_complete(run.dir, 80)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_a_rank_that_is_killed_on_a_full_disk_is_started_again(small_disk):
    """The supervisor goes on from memory, and the record is complete in the end."""
    run = submit(small_disk, 60, {20: "fill", 25: "crash", 30: "free"})
    assert run.wait() == 0
    assert_complete_after_a_crash(run.dir, 60)
    kinds = [
        event["kind"] for event in run.dir.read_events() if event["kind"] not in ("checkpoint", "failure")
    ]
    assert kinds == ["submitted", "started", "restart", "started", "resumed", "finished"]
    assert any("SIGKILL" in cause for cause in failures(run.dir))
    assert run.dir.failure(0, 0).exists()
    log = run.dir.supervisor_log.read_text()
    assert "attempt 1: starting" in log
    assert "Traceback" not in log + run.dir.slurm_log.read_text()
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.parametrize("crash", [{}, {25: "crash"}], ids=["trained", "crashed"])
def test_a_job_on_a_disk_that_turns_read_only_ends_well(small_disk, crash):
    run = submit(small_disk, 80, {20: "protect", **crash, (30 if crash else 60): "unprotect"})
    assert run.wait() == 0, run.describe()
    causes = failures(run.dir)
    assert any("Read-only file system" in cause for cause in causes)
    assert any("SIGKILL" in cause for cause in causes) == bool(crash)
    assert_complete_after_a_crash(run.dir, 80)
    assert "Traceback" not in run.dir.supervisor_log.read_text() + run.dir.slurm_log.read_text()
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_disk_that_stays_read_only_ends_the_run_with_that_cause(small_disk):
    run = submit(small_disk, 30, {10: "protect"})
    done = run.hpctrain("wait", str(run.path), timeout=380, check=False)
    assert done.returncode == RunFailed.exit_code
    assert_no_process_left(run.path)
    run_command(["umount", "--lazy", small_disk])
    listed, _ = list_checkpoints(run.dir, verify=True)
    assert [one.problems for one in listed] == [()] * len(listed)
    assert any(one.newest and one.step <= 10 for one in listed)
    assert run.status()["state"] == "FAILED"
    assert "Read-only file system" in run.dir.slurm_log.read_text()


def assert_complete_after_a_crash(run: RunDir, last_step: int) -> None:
    """Steps of the first start whose lines were lost with their rank are trained again."""
    assert {record["step"] for record in read_json_lines(run.metrics)} == set(range(1, last_step + 1))
    assert list_checkpoints(run, verify=True)[0][-1].step == last_step


#: Three checkpoints of a megabyte fit on the disk, and a fourth one does not.
WIDE = 512


def no_room(run: Run) -> str:
    return f"no space for the checkpoint of step 12 in {run.dir.checkpoints}"


def enlarge(disk: Path) -> None:
    run_command(["mount", "-o", "remount,size=64m", disk])


def test_the_last_save_waits_for_room_and_nothing_is_trained_twice(small_disk, tmp_path):
    run = submit(small_disk, 12, {}, "--notify", f"cat > {tmp_path}/told", width=WIDE)
    wait_for(
        lambda: "no space for the checkpoint of step 12" in (run.status()["not_saved"] or ""),
        100,
        "the notice",
    )
    wait_for((tmp_path / "told").exists, 30, "the notification")
    told = json.loads((tmp_path / "told").read_text())
    assert told["occasion"] == "stall"
    assert f"{no_room(run)}: it needs 1.1 MB, but only " in told["text"]
    enlarge(small_disk)
    assert run.wait() == 0
    assert_complete(run.dir, 12)
    assert len(run.events("started")) == 1
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_waits_for_room_in_vain_says_what_to_free_and_how_to_resume(small_disk):
    run = submit(small_disk, 12, {}, "--env", "ROOM_LIMIT_S=2", width=WIDE)
    assert run.wait() == 4
    assert len(run.events("started")) == 1, "another start would end the same way"
    assert [event["class"] for event in run.events("failure") if event.get("rank") is not None] == [
        "disk-full"
    ]
    (end,) = run.events("finished")
    assert f"{no_room(run)}: it needs 1.1 MB, but only " in end["cause"]
    assert "Traceback" not in run.dir.rank_log(0, 0).read_text() + run.dir.rank_log(0, 1).read_text()
    assert "Traceback" not in run.hpctrain("logs", str(run.path), "--errors").stdout
    _, found, command = end["cause"].rpartition(": ")
    assert found
    assert command.startswith("hpctrain resume ")
    enlarge(small_disk)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_command(["bash", "-c", command], {**run.env, "PATH": path})
    assert run.wait() == 0
    assert list_checkpoints(run.dir, verify=True)[0][-1].step == 12


def test_a_stop_waits_for_room_within_the_time_that_it_leaves(small_disk):
    run = RunDir(small_disk / "run")
    train(run, 60, {10: "fill", 12: "stop"}, HPCTRAIN_STOP_GRACE="SIGTERM=60")
    (stop,) = [event for event in run.read_events() if event["kind"] == "signal"]
    assert stop["saved"] is True
    assert list_checkpoints(run, verify=True)[0][-1].step == stop["step"]


@pytest.mark.long
def test_a_stop_that_leaves_no_time_to_wait_for_room_goes_on_from_the_checkpoint_before(small_disk):
    run = RunDir(small_disk / "run")
    train(run, 60, {10: "fill", 12: "stop"}, HPCTRAIN_STOP_GRACE="SIGTERM=2")
    (stop,) = [event for event in run.read_events() if event["kind"] == "signal"]
    assert stop["saved"] is False
    assert list_checkpoints(run, verify=True)[0][-1].step <= 10
