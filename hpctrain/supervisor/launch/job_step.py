"""Define the interface of a job step: tasks that start together, their results and its events."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from hpctrain.errors import EXIT_CONTINUE
from hpctrain.text import signal_name

#: Stop signals. A task killed by a stop signal counts as stopped.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


class TaskResult(Enum):
    DONE = "done"
    CONTINUE = "continue"
    """The state is saved, or there was no state yet: continue later."""
    FAILED = "failed"


@dataclass(frozen=True)
class TaskExit:
    """Exit of a task that was not caused by the supervisor."""

    rank: int
    code: int | None
    signal: int | None = None
    out_of_memory: bool = False
    """True if the kernel killed the task because the job exceeded its memory."""

    @property
    def result(self) -> TaskResult:
        if self.code == 0:
            return TaskResult.DONE
        if self.code == EXIT_CONTINUE or self.signal in _STOP_SIGNALS:
            return TaskResult.CONTINUE
        return TaskResult.FAILED

    @classmethod
    def from_returncode(cls, rank: int, returncode: int) -> TaskExit:
        """Convert a return code of `subprocess`: a negative code is a signal."""
        return cls(rank, None, -returncode) if returncode < 0 else cls(rank, returncode)

    def __str__(self) -> str:
        return f"was killed by {signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"


@dataclass(frozen=True)
class StepEnded:
    """End of the step: no task is left."""

    returncode: int
    stderr_tail: str = ""
    """End of the launcher's output, if the launcher itself failed."""


@dataclass(frozen=True)
class SignalReceived:
    """A signal to the supervisor."""

    signal: signal.Signals


@dataclass(frozen=True)
class RankSignalled:
    """A stop signal that a rank received; Slurm signals the ranks directly."""

    rank: int
    signal: str


@dataclass(frozen=True)
class StopRequested:
    """A request of the supervisor itself to stop the ranks."""

    reason: str
    draining: Mapping[str, str] = field(default_factory=dict)
    """Nodes that the next attempt must not use, with the reason; if empty, the run ends."""


@dataclass(frozen=True)
class HangDetected:
    """A hang: no rank makes progress, and the step must be ended."""

    cause: str
    rank: int
    """The rank that the others wait for; the first rank if unknown."""
    host: str


@dataclass(frozen=True)
class LauncherStuck:
    """All tasks of the step have exited, but the launcher was not notified and would wait forever."""


StepEvent = (
    TaskExit | StepEnded | SignalReceived | RankSignalled | StopRequested | HangDetected | LauncherStuck
)
EmitEvent = Callable[[StepEvent], None]


class JobStep(Protocol):
    """A running step. Its events go to the `emit` passed to the launcher."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every task."""

    def is_over(self) -> bool:
        """Return true if the scheduler no longer lists the step, even without `StepEnded`."""

    def kill(self) -> None:
        """Kill every task immediately; `StepEnded` follows."""

    def close(self) -> None:
        """Ensure that no process is left. Waits for a bounded time."""


class Launcher(Protocol):
    """Starts the tasks of an attempt, one per rank."""

    hosts: list[str]
    """The nodes of the next step in rank order; lost nodes are removed."""
    spares: list[str]
    address: str
    """Address of the supervisor's host for the tasks."""

    def start(
        self, command: list[str], variables: Mapping[str, str], emit: EmitEvent, *, beside: bool = False
    ) -> JobStep:
        """Start one task per rank; `beside` is true if the step shares the nodes with a running step."""
