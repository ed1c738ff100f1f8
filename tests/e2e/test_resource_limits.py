"""Fork bombs, full temporary folders, few file descriptors, closed terminals and deleted scripts."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.commands import environment, run_command
from helpers.disks import mounted_disk
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run
from helpers.waiting import wait_for

OPTIONS = ["--backend", "local", "--ntasks-per-node", "1", "--no-code-snapshot"]
#: Limit on processes and threads in a test's namespace.
_MOST_PROCESSES = 450

BOMB = """
import os, sys, time
if sys.argv[1] != "ends":
    # The supervisor has all its threads once its store responds.
    from torch.distributed import TCPStore
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    TCPStore(address, port, is_master=False, wait_for_workers=False).set("key", "value")
children = 0
try:
    for children in range(500):
        if os.fork() == 0:
            if sys.argv[1] == "sessions":
                os.setsid()
            time.sleep(600)
            os._exit(0)
except BlockingIOError:
    print("no child after", children, flush=True)
    if sys.argv[1] == "raises":
        raise
open(os.environ["HPCTRAIN_RUN_DIR"] + "/full", "w").close()
time.sleep(2 if sys.argv[1] == "ends" else 600)
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


def submit_script(
    folder: Path, script: str, *args: str, env: dict[str, str] | None = None, name: str = "run"
) -> Run:
    """Submit a run of a script."""
    (folder / "train.py").write_text(script)
    run = Run(folder / name, env or {})
    run.hpctrain("submit", *OPTIONS, "--run-dir", str(run.path), str(folder / "train.py"), *args)
    return run


@contextmanager
def limited_processes(folder: Path, script: str, *args: str) -> Iterator[Run]:
    """A run in its own namespace with few processes, all of which end with the block."""
    if os.geteuid():
        pytest.skip("a namespace of processes takes root")
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    limit = f"echo {_MOST_PROCESSES} > /proc/sys/kernel/pid_max"
    before = Path("/proc/sys/kernel/pid_max").read_text()
    probe = [*namespace, "sh", "-c", f"{limit} && cat /proc/sys/kernel/pid_max"]
    # Kernels before 6.14 have one limit for the whole machine, which must not change.
    if tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) < (6, 14):
        pytest.skip("this kernel has no limit on the processes of a namespace")
    result = run_command(probe, check=False)
    assert Path("/proc/sys/kernel/pid_max").read_text() == before
    if result.returncode:
        pytest.skip(f"no namespace of processes can be made here: {result.stderr}")
    (folder / "train.py").write_text(script)
    run = Run(folder / "run", {})
    # The namespace's own processes must not look like those of the run.
    submit = [sys.executable, "-m", "hpctrain", "submit", *OPTIONS, "--run-dir", "run", "train.py", *args]
    # The shell also reaps the orphans of the namespace, as any init does.
    line = f'{limit}; "$@"; sleep 600; true'
    with subprocess.Popen(
        [*namespace, "sh", "-c", line, "sh", *submit], env=environment(), cwd=folder
    ) as process:
        try:
            yield run
        finally:
            process.kill()


def supervisor_pid(run: Run) -> int:
    (pid,) = (process.pid for process in run_processes(run.path) if "hpctrain.supervisor" in process.argv)
    return pid


def test_fork_bomb_that_hits_the_limit_is_the_cause(tmp_path):
    with limited_processes(tmp_path, BOMB, "raises") as run:
        wait_for(lambda: run.events("finished"), 300, "the end of the run")
        (finished,) = run.events("finished")
        assert finished["state"] == "FAILED"
        assert "BlockingIOError" in finished["cause"]
        assert_no_process_left(run.path)
        assert run.status()["state"] == "FAILED"


@pytest.mark.parametrize("mode", ["stays", "sessions"])
def test_run_is_cancelled_when_no_process_can_be_started(tmp_path, mode):
    """Children that have left their rank's session are ended, too."""
    with limited_processes(tmp_path, BOMB, mode) as run:
        wait_for((run.path / "full").exists, 150, "all processes")
        assert "no child after" in run.dir.rank_log(0, 0).read_text()
        os.kill(supervisor_pid(run), signal.SIGTERM)
        wait_for(lambda: run.events("finished"), 300, "the end of the run")
        assert_no_process_left(run.path)
        assert run.events("finished")[-1]["state"] == "CANCELLED"
        assert "Traceback" not in run.dir.supervisor_log.read_text()


def test_children_of_a_finished_script_are_ended(tmp_path):
    run = submit_script(tmp_path, BOMB, "ends")
    assert run.wait() == 0
    assert_no_process_left(run.path)
    assert run.status()["state"] == "COMPLETED"


PRINT_SLOWLY = "import time\nfor i in range(40):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"


def test_closing_the_terminal_of_follow_keeps_the_run_alive(tmp_path):
    (tmp_path / "train.py").write_text(PRINT_SLOWLY)
    run = Run(tmp_path / "run", {})
    args = [
        sys.executable,
        "-m",
        "hpctrain",
        "submit",
        *OPTIONS,
        "--follow",
        "--run-dir",
        str(run.path),
        "train.py",
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(args[0], args, environment())
    output = b""
    while b"line 3" not in output:
        output += os.read(terminal, 4096)
    os.close(terminal)
    wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0], 30, "the end of the command")
    assert run.wait() == 0
    assert "line 39" in run.dir.rank_log(0, 0).read_text()
    assert_no_process_left(run.path)


def test_script_deleted_after_submission(tmp_path):
    run = submit_script(tmp_path, PRINT_SLOWLY)
    (tmp_path / "train.py").unlink()
    code = run.wait()
    status = run.status()
    if code:  # It was deleted before it was read.
        assert "train.py" in status["cause"]
    resubmitted = run.hpctrain(
        "submit", *OPTIONS, "--run-dir", str(run.path), str(tmp_path / "train.py"), check=False
    )
    assert resubmitted.returncode == 2
    assert "train.py" in resubmitted.stderr
    assert_no_process_left(run.path)


def test_snapshot_of_script_survives_its_deletion(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "train.py").write_text(PRINT_SLOWLY)
    run_command(["git", "init", "--quiet", repository])
    run = Run(tmp_path / "run", {})
    options = [*OPTIONS[:-1], "--run-dir", str(run.path), str(repository / "train.py")]
    run.hpctrain("submit", *options)
    shutil.rmtree(repository)
    assert run.wait() == 0, run.describe()


def test_run_completes_with_a_full_temporary_folder(tmp_path):
    with mounted_disk(tmp_path / "tmp", "size=64k") as disk:
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(1 << 17))
        assert shutil.disk_usage(disk).free == 0
        run = submit_script(tmp_path, PRINT_SLOWLY, env={"TMPDIR": str(disk)})
        assert run.wait() == 0, run.describe()
        run.hpctrain("report", str(run.path), "--json")
        assert_no_process_left(run.path)


def test_run_completes_with_few_file_descriptors(tmp_path):
    (tmp_path / "train.py").write_text(PRINT_SLOWLY)
    run = Run(tmp_path / "run", {})
    submit = [
        sys.executable,
        "-m",
        "hpctrain",
        "submit",
        *OPTIONS,
        "--run-dir",
        run.path,
        tmp_path / "train.py",
    ]
    run_command(["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *submit])
    assert run.wait() == 0, run.describe()
    assert_no_process_left(run.path)
