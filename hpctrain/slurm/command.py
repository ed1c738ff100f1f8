"""Call Slurm commands with a time limit; failures raise errors."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.text import is_count

#: Time limit of one call: longer than Slurm's own commands wait for a busy controller.
COMMAND_LIMIT_S = 60.0
#: Time limit of a list of steps that is repeated if it fails.
_STEPS_LISTED_S = 10.0
#: Time limit in seconds for reading the output of an exited command.
_READING_S = 5.0
#: Part of the message for a missing answer.
NO_ANSWER_MESSAGE = "did not respond within"
#: Part of the message for an answer of `sbatch` without a job id.
NO_JOB_ID_MESSAGE = "printed no job id"
#: Messages for requests that may have arrived although the answer is missing. An overloaded or restarting
#: controller closes connections.
_ANSWER_LOST = (
    *(NO_ANSWER_MESSAGE, NO_JOB_ID_MESSAGE, "Socket timed out", "Zero Bytes were transmitted or received"),
    *("Connection reset by peer", "Transport endpoint is not connected", "Unexpected message received"),
    *("Message receive failure", "Broken pipe"),
)
_UNREACHABLE_ERRORS = (
    *("Unable to contact slurm controller", "Connection refused", "failed: exit code -"),
    *("Communication connection failure", "Message send failure"),
    *("Munge encode failed", "Munge decode failed", "Protocol authentication error"),
)

#: Prefixes of step names, followed by the attempt number.
_RUNNING, _WAITING = "hpctrain-ranks-", "hpctrain-reserve-"
#: Name of the job step that injects faults into the ranks.
CHAOS_STEP = "hpctrain-chaos"

#: Last line of `scontrol show config`. If a site limits RPCs per user (`rl_enable`), scontrol may print its
#: complete answer, but exit with code 1 because its last RPC, a ping, was refused.
_CONFIG_END = "\nSlurmctld(primary) at "

_LEVEL = re.compile(r"^\w+: (?:error|fatal): ")


class CommandKilled(SchedulerError):
    """A signal ended the command; Slurm's signals to a job also reach the commands that it runs."""


class SlurmCall:
    """A Slurm command that starts immediately; its output is read later."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        timeout_s: float = COMMAND_LIMIT_S,
        text: str = "",
    ) -> None:
        self._name, self._timeout_s, self._started_at = command[0], timeout_s, system.monotonic()
        self._process: system.Popen[str] | None = None
        try:
            self._process = _start(command, environ, text)
        except SchedulerError as error:
            self._trouble = error

    def answer(self) -> tuple[str, str]:
        """Return stdout and stderr. Call this only once."""
        if self._process is None:
            raise self._trouble
        with self._process as process:
            try:
                left_s = self._started_at + self._timeout_s - system.monotonic()
                # The command may have exited within its limit, although the limit has passed since.
                least_s = 0.0 if process.poll() is None else _READING_S
                out, err = process.communicate(timeout=max(left_s, least_s))
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise SchedulerError(f"{self._name} {NO_ANSWER_MESSAGE} {self._timeout_s:g} s") from error
        if process.returncode and (err or _CONFIG_END not in out):
            error_class = CommandKilled if process.returncode < 0 else SchedulerError
            raise error_class(f"{self._name} failed: {_words(err) or f'exit code {process.returncode}'}")
        return out, err

    def __del__(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with self._process:
                self._process.kill()


def run_slurm(
    command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float = COMMAND_LIMIT_S
) -> str:
    """Return the stdout of a Slurm command. See `SlurmCall`."""
    return SlurmCall(command, environ, timeout_s=timeout_s).answer()[0]


def run_all(calls: Sequence[SlurmCall]) -> list[str | SchedulerError]:
    """Return the stdout of each call, or its error."""
    answers: list[str | SchedulerError] = []
    for call in calls:
        try:
            answers.append(call.answer()[0])
        except SchedulerError as error:
            # The traceback's frames would keep the caller and the other calls alive.
            answers.append(error.with_traceback(None))
    return answers


def _start(command: Sequence[str], environ: Mapping[str, str], text: str) -> system.Popen[str]:
    # Without this file, Slurm's commands retry for a minute.
    if (conf := environ.get("SLURM_CONF")) and not os.path.exists(conf):
        raise SchedulerError(
            f"SLURM_CONF is {conf!r}, but this file does not exist; correct or unset the variable"
        )
    # Unlike a pipe, a file cannot block the writer.
    with tempfile.TemporaryFile() if text else open(os.devnull, "rb") as stdin:
        if text:
            stdin.write(text.encode())
            stdin.seek(0)
        try:
            return system.Popen(
                command,
                env=environ,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
        except FileNotFoundError as error:
            raise SchedulerError(f"{command[0]} not found on PATH") from error
        except OSError as error:
            raise SchedulerError(f"cannot run {command[0]}: {error.strerror}") from error


def is_answer_lost(error: str) -> bool:
    """True if the request may have arrived despite this error."""
    return any(pattern in error for pattern in _ANSWER_LOST)


def is_transient(error: str) -> bool:
    """True if the error means that the controller is unreachable or the command was killed."""
    return is_answer_lost(error) or any(pattern in error for pattern in _UNREACHABLE_ERRORS)


def job_step_name(attempt: int, *, waits: bool = False) -> str:
    """Return the name of an attempt's step: of its ranks, or of standby workers if `waits`."""
    return f"{_WAITING if waits else _RUNNING}{attempt}"


def list_rank_steps(job_ids: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the newest step of each job in which ranks are running."""
    # An older step only waits until Slurm marks a lost node down.
    steps: dict[str, dict[int, str]] = {}
    for step, name in _named_steps(job_ids, environ):
        job, _, number = step.rpartition(".")
        if is_count(number) and name != CHAOS_STEP:
            steps.setdefault(job, {})[int(number)] = name
    return [
        f"{job}.{max(running)}" for job, named in steps.items() if (running := [*_without_waiting(named)])
    ]


def list_steps(job_id: str, environ: Mapping[str, str]) -> list[str]:
    """Return the steps of a job that srun has started."""
    steps = _named_steps([job_id], environ, _STEPS_LISTED_S)
    return [step for step, _ in steps if is_count(step.rpartition(".")[2])]


def find_step(job_id: str, name: str, environ: Mapping[str, str]) -> str | None:
    return next((step for step, called in _named_steps([job_id], environ) if called == name), None)


def _named_steps(
    job_ids: Sequence[str], environ: Mapping[str, str], timeout_s: float = COMMAND_LIMIT_S
) -> list[tuple[str, str]]:
    command = ["squeue", "--noheader", "--steps", f"--jobs={','.join(job_ids)}", "--format=%i %j"]
    listed = run_slurm(command, environ, timeout_s=timeout_s)
    pairs = [line.split(maxsplit=1) for line in listed.split("\n") if line.strip()]
    return [(pair[0], pair[1].strip() if len(pair) > 1 else "") for pair in pairs]


def _without_waiting(named: Mapping[int, str]) -> Iterator[int]:
    """Yield the numbers of the steps whose workers are not waiting for another of these steps to end."""
    names = set(named.values())
    for number, name in named.items():
        attempt = name.removeprefix(_WAITING)
        waits = is_count(attempt) and names.intersection(
            (job_step_name(int(attempt) - 1), job_step_name(int(attempt) - 1, waits=True))
        )
        if not waits:
            yield number


def _words(stderr: str) -> str:
    """Return the error messages of a Slurm command; only fatal messages if there are any."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if ": fatal: " in line] or lines
    return "; ".join(_LEVEL.sub("", line) for line in reasons)
