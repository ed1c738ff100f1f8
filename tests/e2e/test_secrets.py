"""Values of `--env` appear only in the ranks' environment and in files that only the owner can read."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run
from helpers.waiting import wait_for

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
def command_lines_with(text: str) -> Iterator[set[str]]:
    """Command lines of this machine that contain `text`, sampled during the block."""
    matches: set[str] = set()
    finished = threading.Event()
    needle = text.encode()

    def sample() -> None:
        while not finished.is_set():
            for name in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    line = Path("/proc", name, "cmdline").read_bytes()
                    if needle in line:
                        matches.add(line.decode(errors="replace"))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield matches
    finally:
        finished.set()
        thread.join()


def contains(path: Path, text: str) -> bool:
    return text.encode() in path.read_bytes()


def check_secret_is_hidden(env: Mapping[str, str], shape: list[str], folder: Path, umask: int) -> None:
    """Train with a secret and check that nothing exposes it, during the run and after it."""
    # In parts, so that no command line of this test contains it.
    token = "sekrit-" + secrets.token_hex(8)
    folder.chmod(0o755)
    (folder / "token").write_text(token)
    (folder / "job.py").write_text(SCRIPT)
    run = Run(folder / "run", env)
    command = [
        "submit",
        *shape,
        "--no-code-snapshot",
        "--standby-workers",
        "never",
        "--run-dir",
        str(run.path),
    ]
    variables = ["--env", "API_TOKEN", "--env", "UID=4711 $HOME"]
    hpctrain = [sys.executable, "-m", "hpctrain"]
    before = os.umask(umask)
    try:
        with command_lines_with(token) as matches:
            run_command([*hpctrain, *command, *variables, folder / "job.py"], {**env, "API_TOKEN": token})
            wait_for(lambda: len(list(run.path.glob("saw-*"))) == 2, 60, "both ranks")
            ps = run_command(["ps", "axww", "-o", "args"]).stdout
            (run.path / "leave").touch()
            assert run.wait() == 0, run.describe()
    finally:
        os.umask(before)
    assert token not in ps
    assert not matches
    with_token = [path for path in run.path.rglob("*") if path.is_file() and contains(path, token)]
    assert [path.name for path in with_token] == ["spec.yaml"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in with_token)
    # Slurm creates the batch script's log; the script creates its own files.
    others = [path for path in run.path.rglob("*") if path.name not in ("slurm.log", "leave")]
    others = [path for path in others if not path.name.startswith("saw-")]
    assert [path for path in others if path.stat().st_mode & 0o022] == []
    if "SLURM_CONF" in env:
        assert stat.S_IMODE(run.dir.lease(0).parent.stat().st_mode) == 0o700
    assert_no_process_left(run.path)


@pytest.mark.parametrize("umask", [0o022, 0o002], ids=["022", "002"])
def test_variable_of_a_local_run_is_on_no_command_line(tmp_path, umask):
    check_secret_is_hidden({}, ["--backend", "local", "--nodes", "2"], tmp_path, umask)


def test_variable_of_a_slurm_run_is_on_no_command_line(slurm, tmp_path):
    check_secret_is_hidden(slurm.env, ["--nodes", "2"], tmp_path, 0o002)
