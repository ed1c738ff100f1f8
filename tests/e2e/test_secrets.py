"""Values of `--env` appear only in the ranks' environment and in files that only the owner can read.

The run's own secrets appear only in the ranks' environment.
"""

import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run
from helpers.waiting import wait_for

from hpctrain.authentication import SECRET_VARIABLE
from hpctrain.rundir import SUPERVISOR_ADDRESS_VARIABLE

SCRIPT = """
import os, time
from pathlib import Path
here = Path(os.environ["HPCTRAIN_RUN_DIR"])
assert not [name for name in os.environ if name.startswith("HPCTRAIN_ENV_")], dict(os.environ)
(here / f"saw-{os.environ['RANK']}").touch()
while not (here / "leave").exists():
    time.sleep(0.05)
assert os.environ["API_TOKEN"] == (here.parent / "token").read_text(), "another value"
assert os.environ["UID"] == "4711 $HOME"
"""


@contextmanager
def recorded_command_lines() -> Iterator[set[str]]:
    """Command lines of this machine, sampled during the block."""
    lines: set[str] = set()
    finished = threading.Event()

    def sample() -> None:
        while not finished.is_set():
            for name in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    lines.add(Path("/proc", name, "cmdline").read_bytes().decode(errors="replace"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lines
    finally:
        finished.set()
        thread.join()


def contains(path: Path, text: str) -> bool:
    return text.encode() in path.read_bytes()


def run_secrets(run: Run) -> set[str]:
    """Return the run's own secrets, from the environment of its ranks and standby workers."""
    names = (SECRET_VARIABLE, SUPERVISOR_ADDRESS_VARIABLE)
    values = [process.environ.get(name, "") for process in run_processes(run.path) for name in names]
    return {value.rpartition(":")[2] for value in values if value}


@pytest.mark.extended
def test_variable_and_secrets_of_a_slurm_run_are_on_no_command_line(slurm, tmp_path):
    """Neither during the run nor after it; ranks and standby workers have secrets."""
    # In parts, so that no command line of this test contains it.
    token = "sekrit-" + secrets.token_hex(8)
    tmp_path.chmod(0o755)
    (tmp_path / "token").write_text(token)
    # Standby workers are kept only for scripts that import torch.
    (tmp_path / "job.py").write_text(f"import torch\n{SCRIPT}")
    run = Run(tmp_path / "run", slurm.env)
    options = ["--nodes=2", "--no-code-snapshot", "--standby-workers=1", f"--run-dir={run.path}"]
    variables = ["--env", "API_TOKEN", "--env", "UID=4711 $HOME"]
    submit = [sys.executable, "-m", "hpctrain", "submit", *options, *variables, tmp_path / "job.py"]
    before = os.umask(0o002)
    try:
        with recorded_command_lines() as command_lines:
            run_command(submit, {**slurm.env, "API_TOKEN": token})
            wait_for(lambda: len(list(run.path.glob("saw-*"))) == 2, 60, "both ranks")
            own = run_secrets(run)
            log = run.dir.supervisor_log
            wait_for(lambda: "ready for attempt 1" in log.read_text(), 60, "standby workers")
            own |= run_secrets(run)
            run.kill_rank(1)
            wait_for(lambda: len(run.events("started")) == 2, 60, "the second attempt")
            own |= run_secrets(run)
            ps = run_command(["ps", "axww", "-o", "args"]).stdout
            (run.path / "leave").touch()
            assert run.wait() == 0, run.describe()
    finally:
        os.umask(before)
    # One of the connections to the supervisor, one for each step.
    assert len(own) == 3
    for secret in (token, *own):
        assert secret not in ps
        assert [line for line in command_lines if secret in line] == []
    for secret in own:
        assert [path for path in tmp_path.rglob("*") if path.is_file() and contains(path, secret)] == []
    with_token = [path for path in run.path.rglob("*") if path.is_file() and contains(path, token)]
    assert [path.name for path in with_token] == ["spec.yaml"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in with_token)
    # Slurm creates the batch script's log; the script creates its own files.
    others = [path for path in run.path.rglob("*") if path.name not in ("slurm.log", "leave")]
    others = [path for path in others if not path.name.startswith("saw-")]
    assert [path for path in others if path.stat().st_mode & 0o022] == []
    assert stat.S_IMODE(run.dir.lease(0).parent.stat().st_mode) == 0o700
    assert_no_process_left(run.path)
