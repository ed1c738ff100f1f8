"""Decide when a run saves checkpoints, and how long a save may take or wait for space on a full disk."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal, NoReturn, Self

from hpctrain.checkpoint.interval import (
    NODE_MTBF_S,
    SAVE_MARGIN_S,
    InterruptionHistory,
    checkpoint_interval_s,
    longest_save_s,
)
from hpctrain.errors import EXIT_CONTINUE, DiskFull
from hpctrain.record_types import RankPhase
from hpctrain.rundir import VERIFY_STEPS_VARIABLE, VERIFY_SYNC_STEPS_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.text import format_size
from hpctrain.training.components import Components

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


def seconds_until_kill(stop: StopFlag, grace_s: Mapping[str, float], key: str | None) -> float:
    """Return the seconds until this rank is killed; infinite if unknown, or without a stop signal.

    The `key` of the grace time is that of a request, if any; otherwise, the signal.
    """
    if stop.signal_name is None:
        return math.inf
    return stop.received_at + grace_s.get(key or stop.signal_name, math.inf) - time.monotonic()


class FinalSavePlan(Enum):
    AFTER_PENDING_SAVE = "finish the save in flight, then save"
    REPLACE_PENDING_SAVE = "abort the save in flight, then save"
    PENDING_SAVE_ONLY = "finish the save in flight; there is no time for another save"
    NONE = "no time for a save"


def plan_final_save(left_s: float, write_s: float | None, in_flight_s: float | None) -> FinalSavePlan:
    """Return the plan that fits into the remaining time; otherwise, the newest checkpoint is kept."""
    if write_s is None:
        return FinalSavePlan.AFTER_PENDING_SAVE
    whole_s = longest_save_s(write_s)
    rest_s = 0.0 if in_flight_s is None else max(SAVE_MARGIN_S, whole_s - in_flight_s)
    if rest_s + whole_s <= left_s:
        return FinalSavePlan.AFTER_PENDING_SAVE
    if whole_s <= left_s:
        return FinalSavePlan.REPLACE_PENDING_SAVE
    if in_flight_s is not None and rest_s <= left_s:
        return FinalSavePlan.PENDING_SAVE_ONLY
    return FinalSavePlan.NONE


#: Maximum wait for space on a full disk, within the job's time limit.
DISK_WAIT_LIMIT_S = 24 * 3600.0
_POLL_INTERVAL_S = 2.0
#: Assumed size of a checkpoint without its tensors.
_TABLES_BYTES = 64 * 1024
#: Free disk space does not include quotas, so a save is always tried after this time.
_TRY_INTERVAL_S = 60.0


class DiskSpaceWait:
    """Wait for disk space to save the last state, whose steps would be trained again; collective."""

    def __init__(self, components: Components, folder: Path, state_bytes: int) -> None:
        self._parts, self._context, self._folder = components, components.context, folder
        self._needed = sum(components.context.all_gather(state_bytes))
        self._started_at = time.monotonic()
        self._is_reported = False

    def wait(self, left_s: Callable[[], float]) -> bool:
        """Wait until a save may succeed; return False if the time limit is reached."""
        if not self._is_reported:
            self._is_reported = True
            cause = f"{self._describe_space()}. Training waits until space is freed on this disk, then saves."
            self._parts.log.write_event("failure", cause=cause, **{"class": "disk-full"})
            self._parts.progress.print_message(f"hpctrain: {cause}")
        tried_at = time.monotonic()
        while True:
            activity.set_phase(RankPhase.SAVE)
            remaining_s = min(left_s(), self._started_at + DISK_WAIT_LIMIT_S - time.monotonic())
            if (remaining_s := self._context.all_reduce_min(remaining_s)) <= 0:
                return False
            time.sleep(min(_POLL_INTERVAL_S, remaining_s))
            is_due = time.monotonic() - tried_at > min(_TRY_INTERVAL_S, remaining_s)
            if self._context.broadcast_from_main(
                is_due or _free_bytes(self._folder) > self._needed * 1.01 + _TABLES_BYTES
            ):
                return True

    def timeout_error(self) -> DiskFull:
        waited_s = time.monotonic() - self._started_at
        return DiskFull(
            f"{self._describe_space()}. Not enough space was freed in {waited_s:.0f} s. Earlier checkpoints "
            "are intact. Free space on this disk, then resume the run"
        )

    def _describe_space(self) -> str:
        free = self._context.broadcast_from_main(_free_bytes(self._folder))
        return (
            f"The checkpoint of step {self._parts.state.step} needs {format_size(self._needed)} in "
            f"{self._folder}, but only {format_size(free)} is free"
        )


def _free_bytes(folder: Path) -> int:
    for existing in (folder, *folder.parents):
        with suppress(OSError):
            return shutil.disk_usage(existing).free
    return 0
