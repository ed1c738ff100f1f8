"""Faults of every kind on a real Slurm: the losses are those of the undisturbed run."""

import os
import signal
import time
from contextlib import suppress

import pytest
from helpers.commands import run_command
from helpers.disks import mounted_disk
from helpers.processes import assert_no_process_left
from helpers.training_runs import (
    RUN_LIMIT_S,
    Run,
    assert_every_sample_once,
    assert_undisturbed,
    submit,
    submit_script,
)
from helpers.waiting import wait_for

TWO = ["--nodes", "2", "--gpus-per-node", "1"]

pytestmark = pytest.mark.timeout(500)


@pytest.fixture
def assert_like_undisturbed(reference):
    """Return a function that waits for the end of a run, and compares it with the undisturbed one."""

    def wait_and_compare(run: Run, num_ranks: int = 2) -> None:
        assert run.wait() == 0
        assert_undisturbed(run, reference(num_ranks))

    return wait_and_compare


@pytest.mark.long
@pytest.mark.parametrize("process", ["batch script", "supervisor"])
def test_kill_of_the_supervisor(slurm, assert_like_undisturbed, tmp_path, process):
    run = submit(tmp_path / "run", slurm.env, TWO, step_s=0.2)
    run.wait_for_step(14)
    os.kill(run.supervisors()[process == "supervisor"].pid, signal.SIGKILL)
    assert_like_undisturbed(run)
    assert len(run.events("started")) == 2
    if process == "supervisor":
        assert [event["cause"] for event in run.events("failure")] == ["the supervisor was killed"]
        assert len(run.events("restart")) == 1


@pytest.mark.long
def test_kill_of_a_rank_while_slurmctld_is_down_for_30_seconds(slurm, assert_like_undisturbed, tmp_path):
    run = submit(tmp_path / "run", slurm.env, TWO, step_s=0.5)
    run.wait_for_step(8)
    pid = slurm.daemons()["slurmctld"]
    os.kill(pid, signal.SIGKILL)
    down = time.monotonic()
    try:
        run.kill_rank(1)
        time.sleep(30)
    finally:
        slurm.start()
    assert time.monotonic() - down >= 30
    assert_like_undisturbed(run)


@pytest.mark.long
def test_spare_node_replaces_a_dead_one(slurm, assert_like_undisturbed, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, [*TWO, "--spare-nodes", "1"], step_s=0.2)
    run.wait_for_step(8)
    first = run.events("started")[0]["hosts"]
    slurm.kill_node(first[1])
    assert_like_undisturbed(run)
    (replaced,) = run.events("replace")
    assert (replaced["nodes"], replaced["lost"]) == (2, [first[1]])
    assert run.events("started")[1]["hosts"] == replaced["hosts"]
    assert run.events("requeue") == []
    assert run.events("failure")[0]["class"] == "node-lost"


@pytest.mark.extended
@pytest.mark.parametrize("has_spare", [True, pytest.param(False, marks=pytest.mark.long)])
def test_run_leaves_a_draining_node_without_repeating_a_step(
    slurm, reference, free_nodes, tmp_path, has_spare
):
    shape = [*TWO, "--spare-nodes", "1"] if has_spare else ["--nodes", "1:2", "--gpus-per-node", "1"]
    run = submit(
        tmp_path / "run", slurm.env, shape, options=["--set", "scale_up_after=3"], step_s=0.2, slow_attempts=1
    )
    run.wait_for_step(8)
    before = run.events("started")[0]["hosts"]
    drained = f"nodename={before[1]}"
    run_command(["scontrol", "update", drained, "state=drain", "reason=bad fan"], slurm.env)
    try:
        assert run.wait() == 0
    finally:
        run_command(["scontrol", "update", drained, "state=resume"], slurm.env)
    (moved,) = run.events("replace" if has_spare else "shrink")
    assert (moved["nodes"], moved["lost"]) == (2 if has_spare else 1, [before[1]])
    assert "(bad fan)" in moved["cause"]
    assert run.events("failure") == []
    assert run.events("signal")[0]["step"] == run.events("resumed")[0]["step"]
    if has_spare:
        assert run.events("requeue") == []
        assert_undisturbed(run, reference(2))
    else:  # the run may grow again by a requeue
        assert_every_sample_once(run)
    assert_no_process_left(run.path)


@pytest.mark.long
def test_faulty_node_is_excluded_from_the_requeued_job(slurm, assert_like_undisturbed, tmp_path):
    run = submit(tmp_path / "run", slurm.env, TWO, step_s=0.3, slow_attempts=2, checkpoint_every=1000)
    for attempt in range(2):
        wait_for(lambda number=attempt: number in run.dir.attempts(), RUN_LIMIT_S, f"attempt {attempt}")
        wait_for(lambda: len(run.ranks()) == 2, 60, "the ranks")
        run.kill_rank(1)
    assert_like_undisturbed(run)
    suspect = run.events("failure")[0]["host"]
    (excluded,) = run.events("excluded")
    assert (excluded["hosts"], excluded["reason"]) == ([suspect], f"{suspect}: 2 failures of kind killed")
    assert len(run.events("requeue")) == 1
    assert suspect not in run.events("started")[-1]["hosts"]


@pytest.mark.long
def test_straggler_is_reported_and_its_node_excluded(slurm, reference, tmp_path):
    epochs = 50
    further = ["--epochs", str(epochs), "--slow-node", slurm.nodes[1]]
    options = {"checkpoint_every": 50, "slow_attempts": 9, "further": further}
    run = submit(tmp_path / "run", slurm.env, [*TWO, "--spare-nodes", "1"], step_s=0.03, **options)
    # It is detected in each window of twenty seconds, and every third detection counts.
    wait_for(
        lambda: [event["lasting"] for event in run.events("straggler")].count(True) == 2, 250, "two", 0.5
    )
    run.kill_rank(0)
    assert run.wait() == 0
    events = run.events("straggler")
    assert {(event["rank"], event["host"], event["part"]) for event in events} == {
        (1, slurm.nodes[1], "compute")
    }
    assert min(event["ratio"] for event in events) > 4
    (excluded,) = run.events("excluded")
    assert excluded["reason"] == f"{slurm.nodes[1]}: 2 failures of kind straggler"
    assert slurm.nodes[1] not in run.events("started")[1]["hosts"]
    assert_undisturbed(run, reference(2, "--epochs", str(epochs)), epochs)


@pytest.mark.long
def test_kill_of_a_rank_while_the_disk_is_full(slurm, assert_like_undisturbed, tmp_path):
    if slurm.commands.exists():
        pytest.skip("the daemons of a downloaded version do not see disks that are mounted later")
    with mounted_disk(tmp_path / "disk", "size=16m") as disk:
        run = submit(
            disk / "run", slurm.env, TWO, options=["--no-code-snapshot"], step_s=0.2, slow_attempts=2
        )
        run.wait_for_step(8)
        with open(disk / "filler", "wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(1 << 12)):
                pass
        # Some steps cannot be recorded, and a save fails.
        time.sleep(3)
        run.kill_rank(1)
        time.sleep(5)
        (disk / "filler").unlink()
        assert_like_undisturbed(run)
        assert any("No space left" in event["cause"] for event in run.events("failure"))


LEAVES_A_DAEMON = """
import os, subprocess, sys, time
attempt = int(os.environ["HPCTRAIN_ATTEMPT"])
if attempt == 0:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open(sys.argv[1] + ".new", "w").write(str(child.pid))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
    time.sleep(300)
try:
    state = open(f"/proc/{open(sys.argv[1]).read()}/stat").read().rpartition(")")[2].split()[0]
except FileNotFoundError:
    state = "X"
# Nobody may wait for it: then it stays as a zombie, which holds nothing.
print("the daemon is", "gone" if state in "ZX" else "there")
"""


def test_daemon_of_a_rank_does_not_survive_the_attempt(slurm, tmp_path):
    pid_file = tmp_path / "pid"
    run = submit_script(tmp_path, LEAVES_A_DAEMON, str(pid_file), options=["--nodes=1"], env=slurm.env)
    wait_for(pid_file.exists, 60, "the daemon")
    run.kill_rank(0)
    assert run.wait() == 0
    assert "the daemon is gone" in run.dir.rank_log(1, 0).read_text()
    assert_no_process_left(run.path)


def test_user_error_ends_the_run_with_the_traceback_of_the_first_rank(slurm, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no such thing')\n")
    run = Run(tmp_path / "run", slurm.env)
    args = ["--run-dir", str(run.path), "--follow", str(script)]
    result = run.hpctrain("submit", *TWO, *args, timeout=120, check=False)
    assert result.returncode == 4
    text = result.stdout + result.stderr
    assert "rank 1" in text
    assert "ValueError: no such thing" in text
    assert "line 3, in <module>" in text
    assert str(run.dir.rank_log(0, 1)) in text
    (failure,) = run.events("failure")
    assert (failure["class"], run.events("requeue"), run.events("restart")) == ("user-error", [], [])
    assert run.status()["state"] == "FAILED"
    assert_no_process_left(run.path)


def test_restart_policy_of_the_submission_is_applied(slurm, tmp_path):
    """A row that the user changed: the same error is retried."""
    script = "import os\nif os.environ['HPCTRAIN_ATTEMPT'] == '0':\n    raise ValueError('once')\n"
    options = ["--nodes=1", "--restart-policy=user-error.retries=1"]
    run = submit_script(tmp_path, script, options=options, env=slurm.env)
    assert run.wait() == 0
    assert [event["class"] for event in run.events("failure")] == ["user-error"]
