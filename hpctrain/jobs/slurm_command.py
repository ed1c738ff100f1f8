"""One call of one of Slurm's commands, with a limit, and its complaints as an error."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence

from hpctrain.errors import SchedulerError

#: Limit for one call: longer than the time that Slurm's commands themselves give a busy controller.
COMMAND_LIMIT_S = 60.0
#: What is said where no answer came in time.
NO_ANSWER = "gave no answer within"
#: What is said where a request may have arrived and only the answer is missing.
_ANSWER_LOST = (NO_ANSWER, "Socket timed out", "Zero Bytes were transmitted or received")
_OUT_OF_REACH = ("Unable to contact slurm controller", "Connection refused", "says: exit code -")

_LEVEL = re.compile(r"^\w+: (?:error|fatal): ")
# At the head of a line of its own, where no job name can stand.
_JOB_FIELDS = {
    "JobState": re.compile(r"^ +JobState=(\S+)", re.MULTILINE),
    "Requeue": re.compile(r"^ +Requeue=(\d)", re.MULTILINE),
    "Restarts": re.compile(r"^ +Requeue=\d Restarts=(\d+)", re.MULTILINE),
}


def run_slurm(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout_s: float = COMMAND_LIMIT_S,
    text: str = "",
    with_stderr: bool = False,
) -> str:
    """The output of `command`, run with the variables of `environ` alone.

    Args:
        command: one of Slurm's.
        environ: all variables that it gets.
        timeout_s: seconds after which it is given up.
        text: what it reads from its standard input.
        with_stderr: whether what it says on stderr is wanted, too.

    Raises:
        SchedulerError: it is missing, failed or took too long; the message is in Slurm's words.
    """
    begun = time.monotonic()
    with _start(command, environ) as process:
        out, err = _end(process, command[0], begun, timeout_s, text)
    return out + (err if with_stderr else "")


def run_side_by_side(
    commands: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    *,
    timeout_s: float = COMMAND_LIMIT_S,
    probe_s: float | None = None,
) -> list[str | SchedulerError]:
    """The output of each command, all run at once; in the place of one that failed, its error.

    Args:
        commands: Slurm's.
        environ: all variables that they get.
        timeout_s: seconds after which they are given up.
        probe_s: where it is given, the first one has to succeed, and that within so many seconds.

    Raises:
        SchedulerError: that one did not; the others are ended.
    """
    begun = time.monotonic()
    processes: list[subprocess.Popen[str] | SchedulerError] = []
    for command in commands:
        try:
            processes.append(_start(command, environ))
        except SchedulerError as error:
            processes.append(error)
    answers: list[str | SchedulerError] = []
    try:
        for command, process in zip(commands, processes, strict=True):
            limit_s = timeout_s if probe_s is None or answers else probe_s
            answers.append(_answer(process, command[0], begun, limit_s))
            if probe_s is not None and isinstance(answers[0], SchedulerError):
                raise answers[0]
    finally:
        for process in processes[len(answers) :]:
            if not isinstance(process, SchedulerError):
                with process:
                    process.kill()
    return answers


def _answer(
    process: subprocess.Popen[str] | SchedulerError, name: str, begun: float, timeout_s: float
) -> str | SchedulerError:
    if isinstance(process, SchedulerError):
        return process
    try:
        with process:
            return _end(process, name, begun, timeout_s)[0]
    except SchedulerError as error:
        return error


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    # Without its file Slurm's commands try again for a minute.
    if (conf := environ.get("SLURM_CONF")) and not os.path.exists(conf):
        raise SchedulerError(f"SLURM_CONF names {conf!r}, which does not exist")
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"there is no {command[0]} on the PATH") from error


def _end(
    process: subprocess.Popen[str], name: str, begun: float, timeout_s: float, text: str = ""
) -> tuple[str, str]:
    try:
        out, err = process.communicate(text, timeout=max(0.0, begun + timeout_s - time.monotonic()))
    except BaseException as error:
        process.kill()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise SchedulerError(f"{name} {NO_ANSWER} {timeout_s:g} s") from error
    if process.returncode:
        raise SchedulerError(f"{name} says: {_words(err) or f'exit code {process.returncode}'}")
    return out, err


def is_answer_lost(error: str) -> bool:
    """Whether a complaint leaves open if the request has arrived."""
    return any(words in error for words in _ANSWER_LOST)


def may_succeed_later(error: str) -> bool:
    """Whether a complaint says that the controller is out of reach, or that the command was killed."""
    return is_answer_lost(error) or any(words in error for words in _OUT_OF_REACH)


def job_fields(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """JobState, Requeue and Restarts of a job as the controller has them, as far as the answer has them.

    Raises:
        SchedulerError: the controller does not answer, or knows the job no longer.
    """
    record = run_slurm(["scontrol", "show", "job", job_id], environ)
    return {field: match[1] for field, pattern in _JOB_FIELDS.items() if (match := pattern.search(record))}


def steps_of(job_ids: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The steps of jobs in which tasks run now; the batch script and Slurm's own steps are left out.

    Raises:
        SchedulerError: the controller does not answer, or knows the only job that was named no longer.
    """
    listed = run_slurm(
        ["squeue", "--noheader", "--steps", f"--jobs={','.join(job_ids)}", "--format=%i"], environ
    )
    return [step for step in listed.split() if step.rpartition(".")[2].isdigit()]


def _words(stderr: str) -> str:
    """What a command of Slurm's complains about; where it gave up, only why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if ": fatal: " in line] or lines
    return "; ".join(_LEVEL.sub("", line) for line in reasons)
