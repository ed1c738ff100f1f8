"""Children of a process, and orphans of earlier attempts."""

import os
import subprocess
import sys
import threading
import time

import pytest

from hpctrain.cluster.kill_orphans import kill_orphans
from hpctrain.cluster.processes import child_pids
from hpctrain.rundir import ATTEMPT_VARIABLE, CHILD_VARIABLE, RUN_DIR_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc to look for processes in")


@pytest.fixture
def start():
    started = []

    def start(run_dir, attempt, **variables):
        env = {**os.environ, RUN_DIR_VARIABLE: str(run_dir), ATTEMPT_VARIABLE: str(attempt), **variables}
        started.append(subprocess.Popen(["sleep", "60"], env=env, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("has_pidfd", [True, False], ids=["pidfd", "old_python"])
def test_orphans_of_earlier_attempts_of_this_run_are_killed(start, tmp_path, monkeypatch, has_pidfd):
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    first, second, current = (start(tmp_path / "run", attempt) for attempt in range(3))
    other = start(tmp_path / "other", 0)
    # A job that the batch script has submitted inherits its variables.
    chained = start(tmp_path / "run", 0, **{CHILD_VARIABLE: '{"job": "7"}', "SLURM_JOB_ID": "8"})
    assert sorted(kill_orphans(str(tmp_path / "run"), 2)) == sorted([first.pid, second.pid])
    assert [first.wait(120), second.wait(120)] == [-9, -9]
    assert current.poll() is None
    assert kill_orphans(str(tmp_path / "run"), 2) == []
    assert kill_orphans(str(tmp_path / "run")) == [current.pid]
    assert (other.poll(), chained.poll()) == (None, None)


def test_children_are_found_while_threads_end():
    ended = threading.Event()

    def start_short_threads() -> None:
        while not ended.is_set():
            for thread in [threading.Thread(target=time.sleep, args=(0,)) for _ in range(20)]:
                thread.start()

    with subprocess.Popen(["sleep", "60"]) as child:
        churn = threading.Thread(target=start_short_threads)
        churn.start()
        try:
            assert all(child.pid in child_pids(os.getpid()) for _ in range(1000))
        finally:
            ended.set()
            churn.join()
            child.kill()
