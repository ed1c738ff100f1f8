"""Run commands with a time limit and without a scheduler's variables."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from helpers import REPOSITORY
from helpers.waiting import scaled

_SCHEDULER_VARIABLES = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "HPCTRAIN_")


def skip_or_fail(problem: str | None) -> None:
    """Skip the test because of a problem of this machine, if there is one; with CI=true, fail."""
    if problem and os.environ.get("CI") == "true":
        pytest.fail(f"CI=true, so this has to work here: {problem}", pytrace=False)
    if problem:
        pytest.skip(problem)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment without the variables of a scheduler or a run, plus `extra`.

    `extra` may be `slurm.env`, for example. `hpctrain` is importable in it, installed or not. This machine's
    GPUs and the configuration of site and user are hidden, so that a test does the same everywhere.
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
    """Run a command in `environment(env)` and return its output.

    The test fails, with the output, if the command fails (unless `check` is off) or takes longer than
    `timeout` seconds. Then its whole process group is killed.
    """
    command = [str(word) for word in argv]
    with subprocess.Popen(
        command,
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
            out, err = process.communicate(timeout=scaled(timeout))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise AssertionError(
                f"no end after {timeout} s: {command}\nstdout:\n{out}\nstderr:\n{err}"
            ) from None
    result = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and result.returncode:
        raise AssertionError(f"exit code {result.returncode}: {command}\nstdout:\n{out}\nstderr:\n{err}")
    return result
