"""The worker as Slurm starts it: one process, with the variables of a job step of one task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment, wait_for

from hpctrain.rundir import RunDir

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n1",
    "SLURMD_NODENAME": "n1",
    "HPCTRAIN_ATTEMPT": "4",
}


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def start(run: RunDir, text: str, *args: str, **more) -> subprocess.Popen[bytes]:
    script = run.path.parent / "script.py"
    script.write_text(text)
    command = [sys.executable, "-P", "-m", "hpctrain.runtime.worker", json.dumps([str(script), *args])]
    env = environment({**STEP, "HPCTRAIN_RUN_DIR": str(run.path), **more.pop("env", {})})
    return subprocess.Popen(command, env=env, **more)


def log(run: RunDir) -> str:
    return run.rank_log(4, 1).read_text()


def test_the_script_sees_its_words_its_folder_and_its_ranks(run):
    text = (
        "import os, sys\n"
        "print(sys.argv[1:], os.path.samefile(sys.path[0], os.path.dirname(__file__)), __name__)\n"
        "print({name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR')})\n"
    )
    assert start(run, text, "--lr", ":").wait(30) == 0
    assert "['--lr', ':'] True __main__" in log(run)
    assert "{'RANK': '1', 'WORLD_SIZE': '2', 'LOCAL_RANK': '1', 'MASTER_ADDR': 'n1'}" in log(run)


def test_a_file_of_the_users_folder_is_not_taken_for_a_module_of_ours(run, tmp_path):
    (tmp_path / "runpy.py").write_text("raise SystemExit('the wrong runpy')")
    assert start(run, "print('fine')", cwd=tmp_path).wait(30) == 0
    assert "fine" in log(run)


def test_an_exception_leaves_a_failure_file_and_its_traceback_in_the_log(run):
    assert start(run, "def f():\n    raise ValueError('bad\\udcff data')\nf()\n").wait(30) == 1
    failure = json.loads(run.failure(4, 1).read_text())
    assert (failure["rank"], failure["node"], failure["kind"]) == (1, "n1", "exception")
    assert failure["error"] == "ValueError"
    assert "bad" in failure["message"]
    assert "in f" in failure["traceback"]
    assert failure["log"] == str(run.rank_log(4, 1))
    assert "ValueError" in log(run)


@pytest.mark.parametrize(
    ("words", "code", "failed"),
    [("3", 3, True), ("'no data'", 1, True), ("75", 75, False), ("0", 0, False), ("None", 0, False)],
)
def test_sys_exit(run, words, code, failed):
    assert start(run, f"import sys\nsys.exit({words})").wait(30) == code
    assert run.failure(4, 1).exists() is failed
    assert ("no data" in log(run)) is ("data" in words)


def test_a_thread_that_never_ends_does_not_keep_a_failed_rank(run):
    text = (
        "import threading, time, sys\nthreading.Thread(target=time.sleep, args=(300,)).start()\nsys.exit(3)"
    )
    assert start(run, text).wait(30) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_while_nobody_listens_leaves_with_75(run, number):
    with start(run, "import time\nprint('here')\ntime.sleep(300)") as process:
        wait_for(lambda: run.rank_log(4, 1).exists() and "here" in log(run), 30, "the script")
        process.send_signal(number)
        assert process.wait(30) == 75
    assert signal.Signals(number).name in log(run)
    assert not run.failure(4, 1).exists()


def test_it_dies_with_the_supervisor_that_holds_its_lifeline(run):
    reading, writing = os.pipe()
    text = "import subprocess, time\nsubprocess.Popen(['sleep', '300'])\nprint('here')\ntime.sleep(300)"
    env = {"HPCTRAIN_LIFELINE_FD": str(reading)}
    with start(run, text, env=env, pass_fds=[reading], start_new_session=True) as process:
        os.close(reading)
        wait_for(lambda: run.rank_log(4, 1).exists() and "here" in log(run), 30, "the script")
        os.close(writing)
        assert process.wait(30) == -signal.SIGKILL
        wait_for(lambda: not group_alive(process.pid), 10, "the end of the rank's children")


def group_alive(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False
