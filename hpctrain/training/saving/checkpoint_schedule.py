"""Decide when a run saves checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, Self

from hpctrain.checkpoint.interval import NODE_MTBF_S, InterruptionHistory, checkpoint_interval_s
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.rundir import VERIFY_STEPS_VARIABLE, VERIFY_SYNC_STEPS_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext

#: Assumed cost of a save before the first measurement, in seconds.
_FIRST_SAVE_S = 2.0
#: Delay of the next save after a failed save; doubles with each further failure, up to the maximum.
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 5.0, 600.0


class CheckpointSchedule:
    """Schedule of saves at a fixed number of steps, or at the optimal interval, by the clock of rank 0."""

    def __init__(
        self,
        every: int | Literal["auto"] | None,
        *,
        num_nodes: int = 1,
        node_mtbf_s: float = NODE_MTBF_S,
        history: InterruptionHistory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every, self._num_nodes, self._clock = every, num_nodes, clock
        self._node_mtbf_s, self._history = node_mtbf_s, history or InterruptionHistory()
        self._started = self._save_started_at = clock()
        self._stall_s = _FIRST_SAVE_S
        self.write_s: float | None = None
        self._in_flight = False
        self._num_failures, self._retry_at = 0, -math.inf

    @property
    def mtbf_s(self) -> float:
        node_seconds = self._num_nodes * (self._clock() - self._started)
        history = InterruptionHistory(self._history.count, self._history.node_seconds + node_seconds)
        return history.node_mtbf_s(self._node_mtbf_s) / self._num_nodes

    @property
    def interval_s(self) -> float:
        return checkpoint_interval_s(self._stall_s, self.write_s or 0.0, self.mtbf_s)

    def is_due_by_step(self, step: int) -> bool:
        return isinstance(self._every, int) and step % self._every == 0

    def is_due_by_time(self) -> bool:
        if self._in_flight:
            return False
        if self.last_failed:
            return not self.in_backoff
        return self._every == "auto" and self._clock() >= self._save_started_at + self.interval_s

    @property
    def in_backoff(self) -> bool:
        return self._clock() < self._retry_at

    @property
    def last_failed(self) -> bool:
        return self._num_failures > 0

    def on_save_started(self, stall_s: float) -> None:
        self._save_started_at, self._stall_s, self._in_flight = self._clock() - stall_s, stall_s, True

    def on_save_committed(self, write_s: float) -> None:
        self.write_s, self._in_flight = write_s, False
        if self.last_failed:
            self._pause()  # the copy to the run folder may fail again

    def on_reached_run_folder(self) -> None:
        self._num_failures, self._retry_at = 0, -math.inf

    def on_save_failed(self) -> None:
        self._in_flight = False
        self._num_failures += 1
        self._pause()

    def _pause(self) -> None:
        longest = _MIN_BACKOFF_S * 2 ** min(self._num_failures - 1, 10)
        self._retry_at = self._clock() + min(_MAX_BACKOFF_S, longest)


@dataclass(frozen=True)
class VerificationSteps:
    """The steps of `hpctrain verify` in this run, which is a copy of the verified run."""

    saved: frozenset[int]
    """Steps whose states are compared; no others are saved."""
    synced: frozenset[int]
    """Steps that the verified run saved. Some algorithms change the state of the ranks before a save."""
    last: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self | None:
        if (text := environ.get(VERIFY_STEPS_VARIABLE)) is None:
            return None
        saved = _parse(text)
        return cls(
            frozenset(saved), frozenset(_parse(environ.get(VERIFY_SYNC_STEPS_VARIABLE, ""))), saved[-1]
        )

    def end_run(self, run: RunDir, context: DistributedContext) -> NoReturn:
        """Collective."""
        if context.ranks.is_main:
            # Otherwise, the supervisor would continue the run.
            run.cancel_request.touch()
        context.barrier()
        raise SystemExit(EXIT_CONTINUE)


def _parse(text: str) -> list[int]:
    return [int(step) for step in text.split(",") if step]
