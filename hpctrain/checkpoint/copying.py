"""Brings checkpoints from the folders of the nodes into the one that they share, behind the training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hpctrain.checkpoint.agreement import Agreement, LostTouch
from hpctrain.checkpoint.commit import Contribution, Site, commit_together
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, entry_of
from hpctrain.checkpoint.node_parts import LARGE_SUFFIX, small_files
from hpctrain.checkpoint.parts import of_file
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import step_name


class NotCopied(CheckpointError):
    """A checkpoint lies in the second tier only: it could not be copied."""


class Copying:
    """Copies one step after the other, all ranks together.

    Rank 0 knows which steps are to be copied; the others are told.
    """

    def __init__(
        self,
        nodes: Site,
        shared: Site,
        agreement: Agreement,
        *,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[NotCopied], None],
    ) -> None:
        """Prepare to copy from `nodes` to `shared`; `agreement` is for what goes on beside the saves."""
        self._nodes, self._shared = nodes, replace(shared, agreement=agreement)
        self._agreement = agreement
        self._on_copied, self._on_failure = on_copied, on_failure
        self._lock = threading.Lock()
        self._pending: list[tuple[int, bool]] = []
        self._is_copying = False
        self._in_use: set[int] = set()
        self._thread: threading.Thread | None = None
        self._give_up = threading.Event()

    @property
    def lost(self) -> str | None:
        """Why nothing is copied any more; None while it is."""
        return self._agreement.lost

    @property
    def needed(self) -> set[int]:
        """The steps that are still to be copied, on rank 0."""
        with self._lock:
            return self._in_use | {step for step, _ in self._pending}

    def request(self, step: int, *, may_skip: bool) -> bool:
        """Have a step copied, on rank 0; returns whether all ranks have to `start`.

        Args:
            step: the step.
            may_skip: where copying is behind, this one need not be copied once there is a newer one.
        """
        with self._lock:
            if not self._is_copying:
                self._is_copying, self._in_use = True, {step}
                return True
            if self._pending and self._pending[-1][1]:
                self._pending.pop()
            self._pending.append((step, may_skip))
            return False

    def start(self, step: int) -> None:
        """Copy this step and those that are requested meanwhile. All ranks must call this."""
        if self._thread is not None:
            self._thread.join()  # it has been told to end
        self._thread = threading.Thread(
            target=self._copy_all, args=(step,), name="hpctrain-checkpoint-copying", daemon=True
        )
        self._thread.start()

    def finish(self, deadline: float | None) -> None:
        """Wait until nothing is copied any more.

        Args:
            deadline: by the monotonic clock; then all ranks give up.
        """
        if self._thread is None:
            return
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up.set()
            self._thread.join()

    def copy(self, step: int, large: Iterable[str], small: Mapping[str, bytes] | None) -> Manifest:
        """Bring a step into the shared folder. All ranks must call this.

        Args:
            step: the step.
            large: the files that this rank copies.
            small: the content of the others; None to read them on rank 0.

        Raises:
            CheckpointError: on all ranks alike.
        """
        path = self._nodes.place.folder / step_name(step)

        def seal(everything: list[tuple[list[FileEntry], None]]) -> Mapping[str, bytes]:
            files = small_files(path) if small is None else small
            copied = {entry for entries, _ in everything for entry in entries}
            for entry in Manifest.decode(files[MANIFEST_NAME], path).files:
                if entry not in copied and entry_of(entry.name, files.get(entry.name, b"")) != entry:
                    raise BrokenCheckpoint(f"{path} has changed since it was written: {entry.name}.")
            return files

        own = Contribution([of_file(path / name) for name in large], seal, None, give_up=self._give_up)
        return commit_together(self._shared, step, own)

    def _copy_all(self, first: int) -> None:
        step: int | None = first
        while step is not None:
            begun = time.monotonic()
            try:
                manifest = self._copy_own(step)
            except CheckpointError as error:
                self._on_failure(NotCopied(str(error)))
            else:
                self._on_copied(manifest, begun)
            try:
                step = self._agreement.from_main(self._next(), "the next step to copy")
            except LostTouch:
                return  # The next save is told so.

    def _copy_own(self, step: int) -> Manifest:
        """Copy what the ranks have written themselves. All ranks must call this."""
        failure = f"step {step} was not copied from {self._nodes.place.folder}"
        own = self._agreement.together(lambda: self._own_large_files(step), failure)
        return self.copy(step, own, None)

    def _own_large_files(self, step: int) -> list[str]:
        """The large files that this rank has written itself."""
        name = f"__{self._agreement.rank}_0{LARGE_SUFFIX}"
        return [name] if (self._nodes.place.folder / step_name(step) / name).exists() else []

    def _next(self) -> int | None:
        if not self._agreement.is_main:
            return None
        with self._lock:
            if self._pending and not self._give_up.is_set():
                step = self._pending.pop(0)[0]
                self._in_use = {step}
                return step
            self._is_copying, self._in_use = False, set()
            return None
