"""A job step seen from the supervisor: tasks that were started together, and how each of them ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from hpctrain.errors import EXIT_CONTINUE

#: Signals that tell a task to stop. One that dies of them, before it could do better, did as it was told.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class Ending(Enum):
    """How a task ended."""

    DONE = "done"
    CONTINUE = "continue"
    """Its state is saved, or there was none yet: continue it later."""
    FAILED = "failed"


@dataclass(frozen=True)
class TaskExit:
    """One task ended by itself: not by the supervisor's hand."""

    rank: int
    code: int | None
    """Exit code, or None where a signal ended it."""
    signal: signal.Signals | None = None
    out_of_memory: bool = False
    """Whether the signal was the kernel's, for the job took more memory than it has."""

    @property
    def ending(self) -> Ending:
        if self.code == 0:
            return Ending.DONE
        if self.code == EXIT_CONTINUE or self.signal in _STOP_SIGNALS:
            return Ending.CONTINUE
        return Ending.FAILED

    @classmethod
    def from_returncode(cls, rank: int, returncode: int) -> TaskExit:
        """From the convention of `subprocess`: a negative code is a signal."""
        if returncode < 0:
            return cls(rank, None, signal.Signals(-returncode))
        return cls(rank, returncode)

    def __str__(self) -> str:
        return f"was ended by {self.signal.name}" if self.signal else f"exited with code {self.code}"


@dataclass(frozen=True)
class StepEnded:
    """The whole step is over: no task of it is left."""

    returncode: int
    words: str = ""
    """What the launcher said last, where it failed itself."""


@dataclass(frozen=True)
class Signalled:
    """The supervisor itself got a signal."""

    signal: signal.Signals


@dataclass(frozen=True)
class Hung:
    """No rank gets on any more: the step is to be ended."""

    cause: str
    rank: int
    """The rank that the others wait for; the first one where that cannot be told."""
    host: str
    absent: tuple[int, ...]
    """All ranks that the others wait for; none where that cannot be told."""


@dataclass(frozen=True)
class Straggling:
    """A rank takes longer than the others, who wait for it."""

    host: str
    rank: int
    ratio: float
    """Of its time to that of most."""
    part: str
    """Where it loses most of it: `data` or `compute`."""
    lasting: bool
    """Whether it has been so for a while."""


@dataclass(frozen=True)
class Unended:
    """All tasks of the step are gone, but its launcher was not told, and would wait for ever."""


Event = TaskExit | StepEnded | Signalled | Hung | Straggling | Unended
Emit = Callable[[Event], None]


class Step(Protocol):
    """A running step. Events come through the `emit` that the launcher was given."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every task."""

    def is_over(self) -> bool:
        """Whether the scheduler knows it no longer, though `StepEnded` may not have come.

        Raises:
            SchedulerError: it does not answer.
        """

    def kill(self) -> None:
        """End every task at once; `StepEnded` follows."""

    def close(self) -> None:
        """Make sure that nothing is left. Waits, for a bounded time."""


class Launcher(Protocol):
    """Starts the tasks of an attempt, one a rank."""

    hosts: list[str]
    """The nodes, in order of their rank. The next step runs on these: one that is lost is taken out."""
    spares: list[str]
    """Nodes of the allocation that wait to take the place of another."""
    address: str
    """Where the tasks reach the supervisor's host."""

    def start(
        self, command: list[str], variables: Mapping[str, str], emit: Emit, *, beside: bool = False
    ) -> Step:
        """Start one task a rank, each running `command` with `variables` on top of the environment.

        Args:
            command: what each task runs.
            variables: what it is told; the number of the attempt is among them.
            emit: takes the events of the step.
            beside: whether it shares the nodes with the step that is running.
        """
