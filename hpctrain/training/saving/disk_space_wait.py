"""Wait for disk space to save the last state; without the save, its steps are trained again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.errors import DiskFull
from hpctrain.records.rank_phase import RankPhase
from hpctrain.runtime.rank_activity import activity
from hpctrain.text import format_size
from hpctrain.training.components import Components

#: Maximum wait, within the job's time limit.
LIMIT_S = 24 * 3600.0
_POLL_INTERVAL_S = 2.0
#: Assumed size of a checkpoint without its tensors.
_TABLES_BYTES = 64 * 1024
#: Free disk space does not include quotas, so a save is always tried after this time.
_TRY_INTERVAL_S = 60.0


class DiskSpaceWait:
    """Wait before the next try after a save failed on a full disk. All ranks must call each method."""

    def __init__(self, parts: Components, folder: Path, state_bytes: int) -> None:
        self._context, self._folder, self._step = parts.context, folder, parts.state.step
        self._needed_bytes = sum(parts.context.all_gather(state_bytes))
        self._started_at = time.monotonic()
        cause = f"{self._describe_space()}. Training waits until space is freed on this disk, then saves."
        parts.log.write_event("failure", cause=cause, **{"class": "disk-full"})
        parts.progress.print_message(f"hpctrain: {cause}")

    def wait(self, left_s: Callable[[], float]) -> bool:
        """Wait until a save may succeed; return False if the time limit is reached."""
        wait_started_at = time.monotonic()
        while True:
            activity.set_phase(RankPhase.SAVE)
            own_limit_s = min(left_s(), self._started_at + LIMIT_S - time.monotonic())
            if (limit_s := self._context.all_reduce_min(own_limit_s)) <= 0:
                return False
            time.sleep(min(_POLL_INTERVAL_S, limit_s))
            is_due = time.monotonic() - wait_started_at > min(_TRY_INTERVAL_S, limit_s)
            has_space = self._free_bytes() > self._needed_bytes * 1.01 + _TABLES_BYTES
            if self._context.broadcast_from_main(is_due or has_space):
                return True

    def timeout_error(self) -> DiskFull:
        waited_s = time.monotonic() - self._started_at
        return DiskFull(
            f"{self._describe_space()}. Not enough space was freed in {waited_s:.0f} s. Earlier checkpoints "
            "are intact. Free space on this disk, then resume the run"
        )

    def _describe_space(self) -> str:
        free_bytes = self._context.broadcast_from_main(self._free_bytes())
        return (
            f"The checkpoint of step {self._step} needs {format_size(self._needed_bytes)} in {self._folder}, "
            f"but only {format_size(free_bytes)} is free"
        )

    def _free_bytes(self) -> int:
        """Return the free bytes on the disk; the folder may not exist."""
        place = next(filter(os.path.isdir, (self._folder, *self._folder.parents)))
        try:
            return shutil.disk_usage(place).free
        except OSError:
            return 0
