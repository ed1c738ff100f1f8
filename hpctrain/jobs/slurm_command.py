"""One call of one of Slurm's commands, with a limit, and its complaints as an error."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from hpctrain.errors import SchedulerError

#: Limit for one call: longer than the time that Slurm's commands themselves give a busy controller.
COMMAND_LIMIT_S = 60.0
#: What a command that has ended left behind is read in less.
_READING_S = 5.0
#: What is said where no answer came in time.
NO_ANSWER = "gave no answer within"
#: What is said where a request may have arrived and only the answer is missing.
_ANSWER_LOST = (NO_ANSWER, "Socket timed out", "Zero Bytes were transmitted or received")
_OUT_OF_REACH = ("Unable to contact slurm controller", "Connection refused", "says: exit code -")

#: Names of steps, before the number of the attempt.
_RUNNING, _WAITING = "hpctrain-ranks-", "hpctrain-reserve-"
#: The name of a step that disturbs the ranks beside it.
CHAOS_STEP = "hpctrain-chaos"

_LEVEL = re.compile(r"^\w+: (?:error|fatal): ")
# At the head of a line of its own, where no job name can stand.
_JOB_FIELDS = {
    "JobState": re.compile(r"^ +JobState=(\S+)", re.MULTILINE),
    "SubmitTime": re.compile(r"^ +SubmitTime=(\S+)", re.MULTILINE),
    "Requeue": re.compile(r"^ +Requeue=(\d)", re.MULTILINE),
    "Restarts": re.compile(r"^ +Requeue=\d Restarts=(\d+)", re.MULTILINE),
}


class Question:
    """A command of Slurm's that runs from now on; what it says is read when that is wanted.

    One that nobody wants an answer to any more is ended.

    Args:
        command: one of Slurm's.
        environ: all variables that it gets.
        timeout_s: seconds after which it is given up.
        text: what it reads from its standard input.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        timeout_s: float = COMMAND_LIMIT_S,
        text: str = "",
    ) -> None:
        self._name, self._timeout_s, self._begun = command[0], timeout_s, time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = _start(command, environ, text)
        except SchedulerError as error:
            self._trouble = error

    def answer(self, timeout_s: float | None = None) -> tuple[str, str]:
        """What it says on stdout and stderr; to be asked for once.

        Args:
            timeout_s: another limit than its own, in seconds from its start.

        Raises:
            SchedulerError: it is missing, failed or took too long; the message is in Slurm's words.
        """
        if self._process is None:
            raise self._trouble
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._process as process:
            try:
                left_s = self._begun + limit_s - time.monotonic()
                # It may have answered in time, to somebody who comes late.
                least_s = 0.0 if process.poll() is None else _READING_S
                out, err = process.communicate(timeout=max(left_s, least_s))
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise SchedulerError(f"{self._name} {NO_ANSWER} {limit_s:g} s") from error
        if process.returncode:
            raise SchedulerError(f"{self._name} says: {_words(err) or f'exit code {process.returncode}'}")
        return out, err

    def __del__(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with self._process:
                self._process.kill()


def run_slurm(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    timeout_s: float = COMMAND_LIMIT_S,
) -> str:
    """The output of a command. See `Question`.

    Raises:
        SchedulerError: it is missing, failed or took too long; the message is in Slurm's words.
    """
    return Question(command, environ, timeout_s=timeout_s).answer()[0]


def run_side_by_side(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str], *, timeout_s: float = COMMAND_LIMIT_S
) -> list[str | SchedulerError]:
    """The output of each command, all run at once; in the place of one that failed, its error."""
    return answers_to([Question(command, environ, timeout_s=timeout_s) for command in commands])


def answers_to(questions: Sequence[Question], *, probe_s: float | None = None) -> list[str | SchedulerError]:
    """The output of each command; in the place of one that failed, its error.

    Args:
        questions: the commands.
        probe_s: where it is given, the first one has to succeed, and that within so many seconds.

    Raises:
        SchedulerError: that one did not.
    """
    answers: list[str | SchedulerError] = []
    for question in questions:
        try:
            answers.append(question.answer(None if answers else probe_s)[0])
        except SchedulerError as error:
            if probe_s is not None and not answers:
                raise
            # The frames behind it would keep whatever asked, and other questions with that.
            answers.append(error.with_traceback(None))
    return answers


def _start(command: Sequence[str], environ: Mapping[str, str], text: str) -> subprocess.Popen[str]:
    # Without its file Slurm's commands try again for a minute.
    if (conf := environ.get("SLURM_CONF")) and not os.path.exists(conf):
        raise SchedulerError(f"SLURM_CONF names {conf!r}, which does not exist")
    stdin = _holding(text) if text else subprocess.DEVNULL
    try:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"there is no {command[0]} on the PATH") from error
    except OSError as error:
        raise SchedulerError(f"{command[0]} cannot be run: {error.strerror}") from error
    finally:
        if text:
            os.close(stdin)


def _holding(text: str) -> int:
    """A file that has no name and holds the text: unlike a pipe it takes all of it, read or not."""
    file = os.memfd_create("stdin")
    with open(file, "wb", closefd=False) as stream:
        stream.write(text.encode())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def is_answer_lost(error: str) -> bool:
    """Whether a complaint leaves open if the request has arrived."""
    return any(words in error for words in _ANSWER_LOST)


def may_succeed_later(error: str) -> bool:
    """Whether a complaint says that the controller is out of reach, or that the command was killed."""
    return is_answer_lost(error) or any(words in error for words in _OUT_OF_REACH)


def job_fields(job_id: str, environ: Mapping[str, str]) -> dict[str, str]:
    """JobState, SubmitTime, Requeue and Restarts of a job, as far as the controller's answer has them.

    Raises:
        SchedulerError: the controller does not answer, or knows the job no longer.
    """
    record = run_slurm(["scontrol", "show", "job", job_id], environ)
    return {field: match[1] for field, pattern in _JOB_FIELDS.items() if (match := pattern.search(record))}


def step_name(attempt: int, *, waits: bool = False) -> str:
    """The name of the step in which the ranks of an attempt run, or `waits` until that begins."""
    return f"{_WAITING if waits else _RUNNING}{attempt}"


def steps_of(job_ids: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The step of each job in which ranks run now; the batch script and Slurm's own steps are left out.

    It is the newest: an older one only waits for Slurm to give up the node that it has lost. One whose
    workers wait for the end of another does not count.

    Raises:
        SchedulerError: the controller does not answer, or knows the only job that was named no longer.
    """
    steps: dict[str, dict[int, str]] = {}
    for step, name in _named_steps(job_ids, environ):
        job, _, number = step.rpartition(".")
        if number.isdigit() and name != CHAOS_STEP:
            steps.setdefault(job, {})[int(number)] = name
    return [
        f"{job}.{max(running)}" for job, named in steps.items() if (running := [*_without_waiting(named)])
    ]


def find_step(job_id: str, name: str, environ: Mapping[str, str]) -> str | None:
    """The step of that name, if the job has it.

    Raises:
        SchedulerError: the controller does not answer, or does not know the job.
    """
    return next((step for step, called in _named_steps([job_id], environ) if called == name), None)


def _named_steps(job_ids: Sequence[str], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    listed = run_slurm(
        ["squeue", "--noheader", "--steps", f"--jobs={','.join(job_ids)}", "--format=%i %j"], environ
    )
    pairs = [line.split(maxsplit=1) for line in listed.split("\n") if line.strip()]
    return [(pair[0], pair[1].strip() if len(pair) > 1 else "") for pair in pairs]


def _without_waiting(named: Mapping[int, str]) -> Iterator[int]:
    """Numbers of the steps whose workers do not wait for the end of another one of them."""
    names = set(named.values())
    for number, name in named.items():
        attempt = name.removeprefix(_WAITING)
        waits = attempt.isdigit() and names.intersection(
            (step_name(int(attempt) - 1), step_name(int(attempt) - 1, waits=True))
        )
        if not waits:
            yield number


def _words(stderr: str) -> str:
    """What a command of Slurm's complains about; where it gave up, only why."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if ": fatal: " in line] or lines
    return "; ".join(_LEVEL.sub("", line) for line in reasons)
