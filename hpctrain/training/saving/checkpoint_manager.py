"""Checkpoint saves of a training run: start, wait, abort, and record the outcome."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.state_tree import split_tree
from hpctrain.checkpoint.store import IO_TIMEOUT_S, CheckpointStore, CommittedSave, TierCopyFailed
from hpctrain.errors import CheckpointError, DiskFull, UserError
from hpctrain.training.base import rng
from hpctrain.training.components import Components
from hpctrain.training.saving.checkpoint_schedule import CheckpointSchedule

#: Time after which a save is considered stuck.
MAX_SAVE_S = 3600.0
#: Minimum wait for a save in flight, and multiple of the previous write time. Training waits for the longer
#: of both; then, a due state is skipped.
_MAX_WAIT_S, _LATEST_FACTOR = 60.0, 3.0
#: The limit if the previous save failed.
_WAIT_IN_TROUBLE_S = 5.0


@dataclass(frozen=True)
class _InFlight:
    step: int
    since: float
    stall_s: float


class CheckpointManager:
    """Writer of a run's checkpoints, one at a time to limit memory; records the outcomes (collective)."""

    def __init__(
        self, parts: Components, store: CheckpointStore, schedule: CheckpointSchedule, folder: Path
    ) -> None:
        self.store, self._schedule, self.folder = store, schedule, folder
        self._state, self._settings = parts.state, parts.settings
        self._log, self._progress = parts.log, parts.progress
        self._is_main = parts.context.ranks.is_main
        self._in_flight: _InFlight | None = None
        self._closed = False
        self._overdue: int | None = None
        self.write_s: float | None = None
        self.found_disk_full = False

    @property
    def in_flight_s(self) -> float | None:
        return None if self._in_flight is None else time.monotonic() - self._in_flight.since

    def check(self) -> None:
        """Check that the state can be saved, to detect errors before the first save."""
        split_tree(self._state.tree(), "state")

    def prepare(self) -> None:
        """Allocate the memory for copies of the state, in the background."""
        with suppress(CheckpointError):  # `async_save` raises and reports the error again
            self.store.prepare(self._state.tree(), rng.capture_rng_state())

    def can_begin(self) -> bool:
        """Wait for the save in flight, within a limit; return true if another save can begin (rank 0)."""
        if self._schedule.in_backoff:
            return False
        if self._in_flight is None:
            return True
        write_s = self._schedule.write_s
        limit_s = IO_TIMEOUT_S if write_s is None else max(_MAX_WAIT_S, _LATEST_FACTOR * write_s)
        if self._schedule.last_failed:
            limit_s = _WAIT_IN_TROUBLE_S
        if self.store.wait(max(0.0, self._in_flight.since + limit_s - time.monotonic())):
            return True
        if self._overdue != self._in_flight.step:
            self._overdue = self._in_flight.step
            cause = (
                f"The checkpoint of step {self._overdue} is still being written after "
                f"{self.in_flight_s:.0f} s, so the state after step {self._state.step} is not saved"
            )
            self._log.write_event("failure", cause=f"{cause}.")
            self._progress.print_message(
                f"hpctrain: {cause}. Until this write has ended, saves are skipped. Training continues."
            )
        return False

    def async_save(self, *, direct: bool = False) -> None:
        """Collective."""
        begun = time.monotonic()
        self.store.wait(MAX_SAVE_S)
        self.collect_finished()
        self._report_missing_folder()
        self.store.async_save(
            self._state.step,
            self._state.tree(),
            rng.capture_rng_state(),
            score=self._score(),
            verified_step=self._state.verified_step,
            direct=direct,
        )
        stall_s = time.monotonic() - begun
        self._in_flight = _InFlight(self._state.step, begun, stall_s)
        self._schedule.on_save_started(stall_s)

    def save_result(self) -> None:
        """Save the state of the last step, and wait; errors except `DiskFull` are recorded (collective)."""
        self.store.wait(MAX_SAVE_S)
        self.collect_finished()
        self._report_missing_folder()
        try:
            saved = self.store.save(
                self._state.step,
                self._state.tree(),
                rng.capture_rng_state(),
                score=self._score(),
                verified_step=self._state.verified_step,
            )
        except DiskFull:
            raise
        except CheckpointError as error:
            self._record_failure(error, "")
            raise
        self._record_saved(saved)

    def add_score(self) -> None:
        """Add the score of a checkpoint that was saved before its validation."""
        score = self._score()
        if score is None or not self._is_main:
            return
        try:
            self.store.add_score(self._state.step, score)
        except (CheckpointError, OSError) as error:
            self._progress.print_message(
                f"hpctrain: cannot record step {self._state.step} as a candidate for the best "
                f"checkpoint: {error}"
            )

    def wait(self, timeout_s: float = MAX_SAVE_S) -> bool:
        return self.store.wait(max(0.0, timeout_s))

    def abandon(self) -> None:
        if not self._closed:
            self.store.abandon()

    def collect_finished(self) -> list[CommittedSave]:
        """Record and report the saves that ended since the last call; return the successful saves."""
        good = []
        for end in self.store.collect_outcomes():
            if isinstance(end, CheckpointError):
                self._record_failure(end, " Training continues; earlier checkpoints are intact.")
            else:
                self._record_saved(end)
                good.append(end)
        return good

    def close(self, timeout_s: float | None = None) -> list[CommittedSave]:
        if self._closed:
            return []
        self._closed = True
        # The next attempt may use other nodes, so delete this node's local tier now.
        for note in self.store.close(clean=True, timeout_s=timeout_s):
            self._progress.print_message(f"hpctrain: {note}")
        return self.collect_finished()

    def is_shared(self, saved: CommittedSave) -> bool:
        return saved.path.parent == self.folder

    def _report_missing_folder(self) -> None:
        if not self._is_main or self.write_s is None:
            return
        try:
            os.stat(self.folder)
        except FileNotFoundError:
            cause = (
                f"{self.folder} and its checkpoints no longer exist. The next save creates the folder again."
            )
            self._log.write_event("failure", cause=cause)
            self._progress.print_message(f"hpctrain: {cause}")
        except OSError:
            return  # the save reports the error

    def _record_saved(self, saved: CommittedSave) -> None:
        self.found_disk_full = False
        for note in saved.notes:
            self._progress.print_message(f"hpctrain: {note}")
        fields: dict[str, Any] = {}
        if self._in_flight is not None and self._in_flight.step == saved.step:
            fields["stall_s"] = self._in_flight.stall_s
            self._in_flight = None
            self._schedule.on_save_committed(saved.seconds)
        if self.is_shared(saved):
            self.write_s = saved.seconds
            self._schedule.on_reached_run_folder()
        if saved.finite is False:
            fields["finite"] = False
            self._progress.print_message(
                f"hpctrain: {saved.path} contains NaN or infinite values in the parameters or the "
                "optimizer state."
            )
        if saved.score is not None:
            fields |= {"score": saved.score, "metric": self._settings.monitor, "mode": self._settings.mode}
        self._log.write_checkpoint(
            saved.step,
            saved.path,
            saved.total_bytes,
            saved.seconds,
            tier="shared" if self.is_shared(saved) else "local",
            **fields,
        )

    def _record_failure(self, error: CheckpointError, reassurance: str) -> None:
        if not isinstance(error, TierCopyFailed):
            self._in_flight = None
        # A failed copy to the run folder may belong to a save before the save in flight.
        if self._in_flight is None:
            self.found_disk_full = isinstance(error, DiskFull)
            self._schedule.on_save_failed()
        self._log.write_event("failure", cause=str(error))
        self._progress.print_message(f"hpctrain: {str(error).rstrip('.')}.{reassurance}")

    def _score(self) -> float | None:
        """Return the state's score; None without `keep_best`, or if this step was not validated."""
        settings, state = self._settings, self._state
        if not settings.keep_best:
            return None
        if settings.monitor not in state.latest and state.validated_step == state.step:
            raise UserError(
                f"monitor is {settings.monitor!r} (for keep_best={settings.keep_best}), but the "
                f"metrics of step {state.step} are {', '.join(map(repr, sorted(state.latest)))}. Set monitor "
                f"to one of these metrics, or return {settings.monitor!r} from validation_step."
            )
        return state.latest.get(settings.monitor)
