"""Run commands with a time limit, and without the variables of a scheduler."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers import REPOSITORY

_SCHEDULER_VARIABLES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "HPCTRAIN_")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what a scheduler or a run put there, and with `extra`, such as `slurm.env`.

    `hpctrain` is importable in it, installed or not; GPUs of this machine, and what site and user have
    configured, are out of sight, so that a test does the same everywhere.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_SCHEDULER_VARIABLES)}
    paths = [str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
        "HPCTRAIN_SITE_CONFIG": "",
        "XDG_CONFIG_HOME": "/nonexistent",
        **(extra or {}),
    }


def run_command(
    argv: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = 60.0,
    cwd: Path | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command in `environment(env)` and return what it printed.

    The test fails, with the output, where the command fails (unless `check` is off) or takes longer than
    `timeout` seconds; its whole process group is killed then.
    """
    words = [str(word) for word in argv]
    with subprocess.Popen(
        words,
        env=environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(
                f"no end after {timeout} s: {words}\nstdout:\n{out}\nstderr:\n{err}"
            ) from None
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode}: {words}\nstdout:\n{out}\nstderr:\n{err}")
    return done


def on_a_terminal(argv: list[str], cwd: Path, columns: int, limit_s: float = 60.0) -> str:
    """What a command shows on a terminal of so many columns, to its end."""
    ours, theirs = pty.openpty()
    env = environment({"COLUMNS": str(columns), "LINES": "20", "TERM": "xterm", "NO_COLOR": "1"})
    process = subprocess.Popen(argv, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + limit_s
    try:
        while True:
            ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no end after {limit_s} s; shown so far: {shown!r}"
            try:
                new = os.read(ours, 65536)
            except OSError:  # Linux's word for the end of a terminal
                break
            if not new:
                break
            shown += new
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode(errors="replace")
