"""Define the interface of a job step: its launcher, its events, and the store at which its ranks meet."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from hpctrain.cluster.ports import bind_socket, store_options
from hpctrain.slurm.srun_step import StepEnded, TaskExit


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

    def start(self, command: list[str], variables: Mapping[str, str], emit: EmitEvent) -> JobStep:
        """Start one task per rank."""


class RendezvousStore:
    """A reserved port for the ranks of one attempt, and the store on this port if the supervisor hosts it.

    Rank 0 hosts the store of the ranks. It is on this host, and listens on the port, which is bound but not
    open. The supervisor hosts the store of torchrun agents and node checks, which outlives their processes.
    The kernel queues their connections until the supervisor, too, has imported PyTorch.
    """

    def __init__(self, address: str, *, hosted: bool = False) -> None:
        self._address = address
        # The store has no authentication, so other hosts can reach it only if ranks run there.
        self._socket = bind_socket(local_only=address == "127.0.0.1")
        self._port: int = self._socket.getsockname()[1]
        self._hosted = hosted
        if hosted:
            self._socket.listen(socket.SOMAXCONN)
        self._store: Any = None

    @property
    def variables(self) -> dict[str, str]:
        return {"MASTER_ADDR": self._address, "MASTER_PORT": str(self._port)}

    def serve(self) -> None:
        """Serve the store until the block ends, if this process hosts it."""
        if not self._hosted:
            return
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        options = store_options(self._socket.detach(), torch.__version__)
        self._store = TCPStore("127.0.0.1", self._port, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._store = None
        self._socket.close()
