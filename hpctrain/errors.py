"""Define the exceptions that hpctrain raises.

A message contains the conflicting values, their sources, and the next step for the user.
The command line converts an error to one line on stderr and `exit_code`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

#: Exit code of a rank that stopped as requested, so that the run continues.
EXIT_CONTINUE = 75


class HpctrainError(Exception):
    """Base class of the exceptions raised by hpctrain."""

    exit_code: ClassVar[int] = 1


class UserError(HpctrainError, ValueError):
    """The user's request cannot be performed."""

    exit_code = 2


class SpecError(UserError):
    """An option, an argument or a path of a job is wrong."""


class EnvironmentMismatch(UserError):
    """Variables of the environment contradict each other, or are incomplete."""


class RunNotFound(UserError):
    """There is no run of that id or folder."""


class SchedulerError(HpctrainError):
    """The scheduler rejected a request, or cannot be reached."""

    exit_code = 3


class RunFailed(HpctrainError):
    """The run ended without success."""

    exit_code = 4


class WaitTimeout(HpctrainError, TimeoutError):
    """The awaited event did not happen within the time limit."""


class RendezvousError(HpctrainError):
    """The ranks of a job did not find each other, or did not form a process group."""


class BadLoss(HpctrainError):
    """The loss of a step is not finite, or far above previous losses."""


class Suspect(NamedTuple):
    """A rank that may have computed wrong results."""

    rank: int
    host: str
    device: str
    """Device name that stays the same in later attempts, such as the UUID of a GPU."""


class SilentCorruption(HpctrainError):
    """The state of a rank is wrong, although no error was reported. All ranks raise this after the same step.

    Attributes:
        suspects: the ranks that may be faulty; a single one if it was identified.
        verified_step: last step after which the complete state was verified.
    """

    def __init__(self, message: str, suspects: Sequence[Suspect], verified_step: int) -> None:
        super().__init__(message)
        self.suspects, self.verified_step = tuple(suspects), verified_step

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.suspects, self.verified_step)


def describe_suspects(majority: str | None, suspects: Sequence[Suspect], verified_step: int) -> str:
    """Return sentences for the message of `SilentCorruption`, after one about the majority, if any."""
    places = "; ".join(f"rank {suspect.rank} ({suspect.device} on {suspect.host})" for suspect in suspects)
    hosts = ", ".join(dict.fromkeys(suspect.host for suspect in suspects))
    text = (
        f"{majority} {places}. The probable cause is faulty hardware. Exclude {hosts}"
        if majority
        else "There is no majority, so any of these devices may be faulty, or the training is not "
        f"deterministic: {places}. Check them"
    )
    return f"{text}, and resume from the checkpoint of step {verified_step} or an earlier one."


class StagingError(HpctrainError):
    """A file cannot be copied to a node."""


class Unauthenticated(HpctrainError):
    """A peer did not prove that it belongs to the run."""


class DataWorkerKilled(HpctrainError):
    """A data worker was killed by a signal."""

    def __init__(self, worker: str, signal_name: str, place: str = "") -> None:
        hint = " A common cause is a lack of memory." if signal_name == signal.SIGKILL.name else ""
        super().__init__(f"{worker} was killed by {signal_name}{place and f' {place}'}.{hint}")


class CheckpointError(HpctrainError):
    """A checkpoint could not be written or read."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint differs from the written content: a part is missing or changed."""


class DiskFull(CheckpointError):
    """There is not enough disk space for a checkpoint, or the quota is exceeded."""
