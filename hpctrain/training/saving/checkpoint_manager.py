"""Start, wait for and abort the saves of a training run, and record their outcomes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint.format.state_tree import split_tree
from hpctrain.checkpoint.store import IO_TIMEOUT_S, CheckpointStore, CommittedSave, TierCopyFailed
from hpctrain.errors import CheckpointError, DiskFull, UserError
from hpctrain.runtime.rank_activity import activity
from hpctrain.schema import RankPhase
from hpctrain.text import format_size
from hpctrain.training.base import rng
from hpctrain.training.components import Components
from hpctrain.training.saving.checkpoint_schedule import CheckpointSchedule
from hpctrain.training.saving.unsaved_objects import UnsavedNumbers

#: Time after which a save is considered stuck.
MAX_SAVE_S = 3600.0
#: Minimum wait for a save in flight, and multiple of the previous write time. Training waits for the longer
#: of both; then, a due state is skipped.
_MAX_WAIT_S, _LATEST_FACTOR = 60.0, 3.0
#: The limit if the previous save failed.
_WAIT_IN_TROUBLE_S = 5.0


class _InFlight(NamedTuple):
    step: int
    since: float
    stall_s: float


class CheckpointManager:
    """Writer of a run's checkpoints, one at a time to limit memory; records the outcomes (collective)."""

    def __init__(
        self, components: Components, store: CheckpointStore, schedule: CheckpointSchedule, folder: Path
    ) -> None:
        self.store, self._schedule, self.folder = store, schedule, folder
        self._parts, self._state, self._settings = components, components.state, components.settings
        self._in_flight: _InFlight | None = None
        self._closed = False
        self._overdue: int | None = None
        self.write_s: float | None = None
        """Seconds until the latest checkpoint was in the run folder; None before the first save."""
        self.found_disk_full = False
        #: Until the first save; only on rank 0.
        self.unsaved_numbers: UnsavedNumbers | None = None

    @property
    def in_flight_s(self) -> float | None:
        return None if self._in_flight is None else time.monotonic() - self._in_flight.since

    def check(self) -> None:
        split_tree(self._state.tree(), "state")

    def prepare(self) -> None:
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
        if self.wait(self._in_flight.since + limit_s - time.monotonic()):
            return True
        if self._overdue != self._in_flight.step:
            self._overdue = self._in_flight.step
            cause = (
                f"The checkpoint of step {self._overdue} is still being written after "
                f"{self.in_flight_s:.0f} s, so the state after step {self._state.step} is not saved."
            )
            self._report_failure(cause, " Until this write has ended, saves are skipped. Training continues.")
        return False

    def async_save(self, *, direct: bool = False) -> None:
        """Collective."""
        begun = time.monotonic()
        self.wait()
        self.collect_finished()
        self.store.async_save(**self._capture(), direct=direct)
        stall_s = time.monotonic() - begun
        self._in_flight = _InFlight(self._state.step, begun, stall_s)
        self._schedule.on_save_started(stall_s)

    def save_result(self, left_s: Callable[[], float]) -> None:
        """Save the state of the last step, and wait, also for space on a full disk (collective)."""
        disk_wait: DiskSpaceWait | None = None
        while True:
            self.wait()
            self.collect_finished()
            try:
                return self._record_saved(self.store.save(**self._capture()))
            except DiskFull:
                disk_wait = disk_wait or self.make_disk_wait()
                if not disk_wait.wait(left_s):
                    raise disk_wait.timeout_error() from None
            except CheckpointError as error:
                self._record_failure(error, "")
                raise

    def make_disk_wait(self) -> DiskSpaceWait:
        return DiskSpaceWait(self._parts, self.folder, self.store.state_bytes)

    def add_score(self) -> None:
        """Add the score of a checkpoint that was saved before its validation."""
        score = self._score()
        if score is None or not self._parts.context.ranks.is_main:
            return
        try:
            self.store.add_score(self._state.step, score)
        except (CheckpointError, OSError) as error:
            self._parts.progress.print_message(
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
        committed = []
        for outcome in self.store.collect_outcomes():
            if isinstance(outcome, CheckpointError):
                self._record_failure(outcome, " Training continues; earlier checkpoints are intact.")
            else:
                self._record_saved(outcome)
                committed.append(outcome)
        return committed

    def close(self, timeout_s: float | None = None) -> list[CommittedSave]:
        if self._closed:
            return []
        self._closed = True
        # The next attempt may use other nodes, so delete this node's local tier now.
        for note in self.store.close(clean=True, timeout_s=timeout_s):
            self._parts.progress.print_message(f"hpctrain: {note}")
        return self.collect_finished()

    def is_shared(self, saved: CommittedSave) -> bool:
        return saved.path.parent == self.folder

    def _capture(self) -> dict[str, Any]:
        unsaved, self.unsaved_numbers = self.unsaved_numbers, None
        if unsaved is not None and (message := unsaved.remark()):
            self._parts.progress.print_message(f"hpctrain: {message}")
        return {
            "step": self._state.step,
            "state": self._state.tree(),
            "rank_state": rng.capture_rng_state(),
            "score": self._score(),
            "verified_step": self._state.verified_step,
        }

    def _record_saved(self, saved: CommittedSave) -> None:
        self.found_disk_full = False
        notes, fields = [*saved.notes], dict[str, Any]()
        if self._in_flight is not None and self._in_flight.step == saved.step:
            fields["stall_s"] = self._in_flight.stall_s
            self._in_flight = None
            self._schedule.on_save_committed(saved.seconds)
        if self.is_shared(saved):
            self.write_s = saved.seconds
            self._schedule.on_reached_run_folder()
        if saved.finite is False:
            fields["finite"] = False
            notes.append(
                f"{saved.path} contains NaN or infinite values in the parameters or the optimizer state."
            )
        if saved.score is not None:
            fields |= {"score": saved.score, "metric": self._settings.monitor, "mode": self._settings.mode}
        for note in notes:
            self._parts.progress.print_message(f"hpctrain: {note}")
        tier = "shared" if self.is_shared(saved) else "local"
        self._parts.log.write_checkpoint(
            saved.step, saved.path, saved.total_bytes, saved.seconds, tier=tier, **fields
        )

    def _record_failure(self, error: CheckpointError, reassurance: str) -> None:
        if not isinstance(error, TierCopyFailed):
            self._in_flight = None
        # A failed copy to the run folder may belong to a save before the save in flight.
        if self._in_flight is None:
            self.found_disk_full = isinstance(error, DiskFull)
            self._schedule.on_save_failed()
        self._report_failure(str(error), reassurance)

    def _report_failure(self, cause: str, reassurance: str) -> None:
        self._parts.log.write_event("failure", cause=cause)
        self._parts.progress.print_message(f"hpctrain: {cause.rstrip('.')}.{reassurance}")

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


#: Maximum wait for space on a full disk, within the job's time limit.
DISK_WAIT_LIMIT_S = 24 * 3600.0
_POLL_INTERVAL_S = 2.0
#: Assumed size of a checkpoint without its tensors.
_TABLES_BYTES = 64 * 1024
#: Free disk space does not include quotas, so a save is always tried after this time.
_TRY_INTERVAL_S = 60.0


class DiskSpaceWait:
    """Wait for disk space to save the last state, whose steps would be trained again (collective)."""

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
