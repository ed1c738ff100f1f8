"""Wait for disk space to save the last state; without the save, its steps are trained again."""

from __future__ import annotations

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
    """Wait before the next try after a save failed on a full disk (collective)."""

    def __init__(self, parts: Components, folder: Path, state_bytes: int) -> None:
        self._context, self._log, self._progress = parts.context, parts.log, parts.progress
        self._folder, self._step = folder, parts.state.step
        self._needed = sum(parts.context.all_gather(state_bytes))
        self._started_at = time.monotonic()
        self._is_reported = False

    def wait(self, left_s: Callable[[], float]) -> bool:
        """Wait until a save may succeed; return False if the time limit is reached."""
        if not self._is_reported:
            self._is_reported = True
            cause = f"{self._describe_space()}. Training waits until space is freed on this disk, then saves."
            self._log.write_event("failure", cause=cause, **{"class": "disk-full"})
            self._progress.print_message(f"hpctrain: {cause}")
        tried = time.monotonic()
        while True:
            activity.set_phase(RankPhase.SAVE)
            own = min(left_s(), self._started_at + LIMIT_S - time.monotonic())
            if (left := self._context.all_reduce_min(own)) <= 0:
                return False
            time.sleep(min(_POLL_INTERVAL_S, left))
            due = time.monotonic() - tried > min(_TRY_INTERVAL_S, left)
            if self._context.broadcast_from_main(
                due or _free_bytes(self._folder) > self._needed * 1.01 + _TABLES_BYTES
            ):
                return True

    def timeout_error(self) -> DiskFull:
        waited = time.monotonic() - self._started_at
        return DiskFull(
            f"{self._describe_space()}. Not enough space was freed in {waited:.0f} s. Earlier checkpoints "
            "are intact. Free space on this disk, then resume the run"
        )

    def _describe_space(self) -> str:
        free = self._context.broadcast_from_main(_free_bytes(self._folder))
        return (
            f"The checkpoint of step {self._step} needs {format_size(self._needed)} in {self._folder}, "
            f"but only {format_size(free)} is free"
        )


def _free_bytes(folder: Path) -> int:
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 0
