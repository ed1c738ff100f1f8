"""One call of one of Slurm's commands, with a limit, and its complaints as an error."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError

#: Limit for one call: longer than the time that Slurm's commands themselves give a busy controller.
COMMAND_LIMIT_S = 60.0
#: What is said where no answer came in time.
NO_ANSWER = "gave no answer within"

_LEVEL = re.compile(r"^\w+: (?:error|fatal): ")
# At the head of a line of its own, where no job name can stand.
_JOB_STATE = re.compile(r"^\s+JobState=(\S+)", re.MULTILINE)


def run_slurm(
    command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = COMMAND_LIMIT_S
) -> str:
    """The output of `command`, run with the variables of `environ` alone.

    Raises:
        SchedulerError: it is missing, failed or took too long; the message is in Slurm's words.
    """
    # Without its file Slurm's commands try again for a minute.
    if (conf := environ.get("SLURM_CONF")) and not os.path.exists(conf):
        raise SchedulerError(f"SLURM_CONF names {conf!r}, which does not exist")
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"there is no {command[0]} on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{command[0]} {NO_ANSWER} {timeout_s:g} s") from error
    if done.returncode:
        raise SchedulerError(f"{command[0]} says: {_words(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def job_state(job_id: str, environ: Mapping[str, str]) -> str | None:
    """The state of a job as the controller has it, such as RUNNING; None where the answer has none.

    Raises:
        SchedulerError: the controller does not answer, or knows the job no longer.
    """
    match = _JOB_STATE.search(run_slurm(["scontrol", "show", "job", job_id], environ))
    return match[1] if match else None


def _words(stderr: str) -> str:
    """What a command of Slurm's complains about; where it gave up, only why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if ": fatal: " in line] or lines
    return "; ".join(_LEVEL.sub("", line) for line in reasons)
