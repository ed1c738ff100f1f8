"""Shells in new jobs and beside the ranks of a run."""

import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.terminal import Terminal
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

HPCTRAIN = (sys.executable, "-P", "-m", "hpctrain")
LOCAL = "--backend=local"
#: A terminal without the startup files of the user.
BASH = {"SHELL": "/bin/bash", "HOME": "/nonexistent"}
#: Ranks that start fast, and train until a file appears.
WAIT = """
import os, time
print("started", flush=True)
while not os.path.exists("done"):
    time.sleep(0.05)
"""


def check_terminal(terminal: Terminal) -> None:
    """Check that size, interrupt and exit code pass through a shell."""

    def size() -> str:
        terminal.send("stty size; echo si''ze\r")
        return terminal.expect("size\r\n")

    terminal.resize(33, 77)
    wait_for(lambda: "33 77" in size(), 20, "the new size, which srun sends late")
    # The shell itself may miss an interrupt between two commands.
    terminal.send("sh -c \"echo sl''eeps; exec sleep 99\"\r")
    terminal.expect("sleeps\r\n")
    terminal.send("\x03")
    terminal.send("echo in''terrupted; exit 7\r")
    terminal.expect("interrupted\r\n")
    assert terminal.wait() == 7


def test_local_shell_has_the_environment_of_a_run(tmp_path):
    options = [LOCAL, "--env=A=a b", "--setup=export B=2"]
    show = ["sh", "-c", 'echo "$A|$B|$PWD|$(env | grep -c HPCTRAIN_SHELL)"; exit 7']
    shown = run_command([*HPCTRAIN, "shell", *options, "--", *show], cwd=tmp_path, check=False)
    assert (shown.returncode, shown.stdout) == (7, f"a b|2|{tmp_path}|0\n"), shown.stderr
    with Terminal([*HPCTRAIN, "shell", LOCAL], tmp_path, BASH) as terminal:
        check_terminal(terminal)


@pytest.mark.slow
def test_slurm_shell_runs_in_an_allocation_like_that_of_a_run(slurm, tmp_path):
    (tmp_path / "train.py").touch()
    run = Run(tmp_path / "run", dict(slurm.env))
    options = ["--nodes=2", "--ntasks-per-node=2", "--time=10", "--gpus-per-node=2", "--env=A=1", "--array=3"]
    run.hpctrain("submit", *options, "--run-dir=run", "--begin=now+1hour", "train.py", cwd=tmp_path)
    run_command([*HPCTRAIN, "cancel", "run"], slurm.env, cwd=tmp_path)
    shell = [*HPCTRAIN, "shell", "--like", str(run.path), "--env=A=2"]
    with Terminal(shell, Path("/"), {**slurm.env, **BASH}) as terminal:
        show = "srun sh -c 'echo $SLURM_PROCID:$CUDA_VISIBLE_DEVICES'"
        terminal.send(f"stty -echo; echo; echo A=$A; {show}; pwd; echo en''d\r")
        shown = terminal.expect("end\r\n")
        terminal.send("stty echo\r")
        assert {"A=2", "0:0,1", "3:0,1", str(tmp_path)} <= set(shown.split("\r\n")), shown
        check_terminal(terminal)
    refused = run_command([*HPCTRAIN, "shell", "--nodes=9"], slurm.env, cwd=tmp_path, check=False)
    assert refused.returncode == 3
    assert "9 nodes" in refused.stderr


@pytest.mark.extended
@pytest.mark.slow
def test_attach_to_a_rank_on_a_slurm_node(slurm, tmp_path):
    options = ["--nodes=2", "--ntasks-per-node=2", "--env=A=a b"]
    run, rank = submit_script(tmp_path, WAIT, options=options, env=slurm.env), 3
    for log in (run.dir.rank_log(0, number) for number in range(4)):
        wait_for(lambda log=log: log.exists() and "started" in log.read_text(), 60, f"the rank of {log}")
    show = 'echo "$RANK|$A|$PWD|$(env | grep -cE "^(HPCTRAIN|MASTER)_")"; setsid sleep 98765 & exit 7'
    attach = ["attach", str(run.path), f"--rank={rank}"]
    shown = run.hpctrain(*attach, "--", "bash", "-c", show, check=False, timeout=20)
    assert (shown.returncode, shown.stdout) == (7, f"{rank}|a b|{run.path.parent}|0\n"), shown.stderr
    assert run_command(["pgrep", "-f", "sleep 98765"], check=False).stdout == ""
    assert "has no rank 9 (--rank)" in run.hpctrain("attach", str(run.path), "--rank=9", check=False).stderr
    with Terminal([*HPCTRAIN, *attach], Path("/"), {**run.env, **BASH}) as terminal:
        check_terminal(terminal)
    with Terminal(
        [*HPCTRAIN, *attach, "--", "sh", "-c", "echo on; sleep 99"], Path("/"), run.env
    ) as terminal:
        terminal.expect("on")
        (tmp_path / "done").touch()
        assert run.wait() == 0
        assert terminal.wait() != 0
    ended = run.hpctrain(*attach, check=False)
    assert ended.returncode == 2
    assert "is COMPLETED. Only a run that is RUNNING can be attached to" in ended.stderr
