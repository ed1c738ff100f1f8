"""Full disks and missing folders during training: the run continues and reports them."""

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


def train(run: RunDir, last_step: int, actions: dict[int, str], **variables: str) -> str:
    run.path.mkdir(exist_ok=True)
    env = variables | {"HPCTRAIN_RUN_DIR": str(run.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_forked(SCRIPT, [str(last_step), json.dumps(actions)], env, ranks=2)


def submit(disk: Path, last_step: int, actions: dict[int, str], *more_options: str, width: int = 64) -> Run:
    """A run of two ranks whose folder is on the failing disk."""
    run = Run(disk / "run", {"WIDTH": str(width)})
    options = ["--backend=local", "--ntasks-per-node=2", f"--run-dir={run.path}", *more_options]
    run.hpctrain("submit", *options, str(SCRIPT), str(last_step), json.dumps(actions))
    return run


def failures(run: RunDir) -> list[str]:
    return [event["cause"] for event in read_json_lines(run.events) if event["kind"] == "failure"]


def assert_complete(run: RunDir, last_step: int) -> None:
    """Every step is recorded once, and the checkpoints are valid and end with the last step."""
    assert [record["step"] for record in read_json_lines(run.metrics)] == list(range(1, last_step + 1))
    listed, _ = list_checkpoints(run, verify=True)
    assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed)
    assert listed[-1].step == last_step
    assert not [path.name for path in run.checkpoints.iterdir() if not path.name.startswith("step-")]


@pytest.mark.parametrize(
    ("actions", "cause"),
    [
        ({10: "fill", 40: "free"}, "No space left"),
        ({10: "protect", 40: "unprotect"}, "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_failing_disk_is_reported_and_no_step_is_lost(small_disk, actions, cause):
    run = RunDir(small_disk / "run")
    output = train(run, 60, actions)
    assert "in step 60" in output
    assert any(cause in text for text in failures(run))
    assert "Training continues; earlier checkpoints are intact" in output
    if cause == "No space left":
        assert f"cannot write {run.metrics}: " in output
        assert "metrics.jsonl is writable again. All lines have been written" in output
    assert_complete(run, 60)


def test_run_killed_on_full_disk_resumes_from_earlier_checkpoint(small_disk):
    run = RunDir(small_disk / "run")
    with pytest.raises(AssertionError, match=r"DiskFull.*The checkpoint of step 20 needs"):
        # The result itself does not fit: this ends the run.
        train(run, 20, {10: "fill"}, ROOM_LIMIT_S="0.5")
    (small_disk / "filler").unlink()
    listed, _ = list_checkpoints(run, verify=True)
    assert any(checkpoint.newest and checkpoint.step <= 10 for checkpoint in listed)
    assert f"resumed after step {listed[-1].step} " in train(run, 20, {})
    assert list_checkpoints(run, verify=True)[0][-1].step == 20


def test_run_completes_without_its_checkpoint_folder(tmp_path):
    run = RunDir(tmp_path / "run")
    train(run, 40, {11: "hide"})
    assert_complete(run, 40)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_permanently_read_only_disk_fails_the_run_with_that_cause(small_disk):
    run = submit(small_disk, 30, {10: "protect"})
    result = run.hpctrain("wait", str(run.path), timeout=380, check=False)
    assert result.returncode == RunFailed.exit_code
    assert_no_process_left(run.path)
    run_command(["umount", "--lazy", small_disk])
    listed, _ = list_checkpoints(run.dir, verify=True)
    assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed)
    assert any(checkpoint.newest and checkpoint.step <= 10 for checkpoint in listed)
    assert run.status()["state"] == "FAILED"
    assert "Read-only file system" in run.dir.slurm_log.read_text()


#: Three checkpoints of a megabyte fit on the disk, a fourth does not.
WIDE = 512


def no_space_message(run: Run) -> str:
    return f"The checkpoint of step 12 needs 1.1 MB in {run.dir.checkpoints}, but only "


def enlarge(disk: Path) -> None:
    run_command(["mount", "-o", "remount,size=64m", disk])


@pytest.mark.long
def test_final_save_waits_for_space_and_no_step_is_repeated(small_disk, tmp_path):
    notify = f"cat > {tmp_path}/part && mv {tmp_path}/part {tmp_path}/told"
    run = submit(small_disk, 12, {}, "--notify", notify, width=WIDE)
    needs = "The checkpoint of step 12 needs"
    wait_for(lambda: needs in (run.status()["not_saved"] or ""), 100, "the notice")
    wait_for((tmp_path / "told").exists, 30, "the notification")
    notification = json.loads((tmp_path / "told").read_text())
    assert notification["occasion"] == "stall"
    assert no_space_message(run) in notification["text"]
    enlarge(small_disk)
    assert run.wait() == 0
    assert_complete(run.dir, 12)
    assert len(run.events("started")) == 1
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_wait_for_space_that_times_out_names_the_resume_command(small_disk):
    run = submit(small_disk, 12, {}, "--env", "ROOM_LIMIT_S=2", width=WIDE)
    assert run.wait() == 4
    assert len(run.events("started")) == 1, "another start would end the same way"
    of_ranks = [event["class"] for event in run.events("failure") if event.get("rank") is not None]
    assert of_ranks == ["disk-full"]
    (end,) = run.events("finished")
    assert no_space_message(run) in end["cause"]
    assert "Traceback" not in run.dir.rank_log(0, 0).read_text() + run.dir.rank_log(0, 1).read_text()
    command = end["cause"].rpartition(": ")[2]
    assert command.startswith("hpctrain resume ")
    enlarge(small_disk)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_command(["bash", "-c", command], {**run.env, "PATH": path})
    assert run.wait() == 0
    assert list_checkpoints(run.dir, verify=True)[0][-1].step == 12


def test_stop_waits_for_space_within_its_grace_period(small_disk):
    run = RunDir(small_disk / "run")
    train(run, 60, {10: "fill", 12: "stop"}, HPCTRAIN_STOP_GRACE="SIGTERM=60")
    (stop,) = [event for event in read_json_lines(run.events) if event["kind"] == "signal"]
    assert stop["saved"] is True
    assert list_checkpoints(run, verify=True)[0][-1].step == stop["step"]
