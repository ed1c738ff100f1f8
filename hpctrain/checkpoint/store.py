"""Writes and finds the checkpoints of a run.

A checkpoint is a folder in the format of `torch.distributed.checkpoint` plus `state.json` (everything that
is no tensor) and `manifest.json`. It is written under a name that no reader looks for; when all ranks have
their part on disk, rank 0 writes the manifest and gives the folder its name. The rename is the commit.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hpctrain.checkpoint.manifest import FileEntry, Manifest, checksum, verified
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.tree import join_tree, split_tree
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.files import fsync_folder, write_atomic
from hpctrain.rundir import step_name, steps_in

_STATE_NAME = "state.json"
_SAVING_PREFIX = ".saving-"


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint; the same value on all ranks."""

    step: int
    path: Path
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, on the CPU."""

    step: int
    path: Path
    state: Any
    """What was given to `save` as `state`."""
    rank_state: dict[str, torch.Tensor] | None
    """What this rank gave as `rank_state`; None where another number of ranks wrote the checkpoint."""


class CheckpointStore:
    """The checkpoints in one folder. Every method is a collective: all ranks of `group` must call it."""

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        *,
        retention: Retention | None = None,
        second_tier: Path | None = None,
    ) -> None:
        """Look at the checkpoints in `folder`. All ranks must call this.

        Args:
            folder: where the checkpoints lie; made at the first save.
            group: a group with a CPU backend over all ranks, or None for a single process.
            retention: which checkpoints stay; the newest three where nothing is said.
            second_tier: a faster folder, of each node or of all, in which saves are written first and
                copied to `folder` in the background.
        """
        keep = (retention or Retention()).last
        self._ended: list[Saved | CheckpointError] = []
        self._folder = folder
        self._group = group
        self._keep = keep
        self._rank = dist.get_rank(group) if group is not None else 0
        self._world_size = dist.get_world_size(group) if group is not None else 1

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        """Allocate, in the background, what `begin` copies a state of this shape into."""

    def begin(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> None:
        """Copy the state and return; it is written and committed in the background. All ranks must call this.

        Where an earlier save is still being written, this waits for it first. How a save ended is told by
        `finished`; nothing is raised here for what goes wrong with a disk.
        """
        try:
            self._ended.append(self.save(step, state, rank_state, score=score))
        except CheckpointError as error:
            self._ended.append(error)

    def finished(self) -> list[Saved | CheckpointError]:
        """How the saves ended that did so since the last call. Never waits, and is no collective."""
        ended, self._ended = self._ended, []
        return ended

    def finish(self, timeout_s: float) -> bool:
        """Wait for the save in flight, and say whether it has ended. No collective."""
        return True

    def abandon(self) -> None:
        """Give up the save in flight, on all ranks, unless it was committed meanwhile. No collective."""

    def close(self, *, run_is_over: bool = False) -> None:
        """End what runs in the background. All ranks must call this.

        Args:
            run_is_over: nobody will resume from the second tier: clean it.
        """

    def save(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> Saved:
        """Write and commit the state after `step` steps.

        Args:
            step: number of completed optimizer steps.
            state: nested dicts, lists, tuples, numbers, texts and tensors; equal on all ranks.
            rank_state: tensors of this rank alone.

        Raises:
            CheckpointError: on all ranks alike, where any rank could not write its part. Nothing was
                committed, and the checkpoints that were there are untouched.
        """
        begun = time.monotonic()
        temporary = self._folder / (_SAVING_PREFIX + step_name(step))
        self._on_main(lambda: self._prepare(temporary), f"checkpoint of step {step} cannot be begun")
        plain, tensors = split_tree(state, "state")
        tensors.update({_rank_key(self._rank, name): tensor for name, tensor in rank_state.items()})
        problem, files = None, list[FileEntry]()
        try:
            with _without_remark_on_single_process():
                dcp_save(
                    tensors, checkpoint_id=temporary, process_group=self._group, no_dist=self._group is None
                )
            files = [checksum(path) for path in sorted(temporary.glob(f"__{self._rank}_*"))]
        except Exception as error:  # noqa: BLE001 (all ranks are told, and raise alike)
            problem = _reason(error)
        parts = self._gather((problem, files))
        problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(parts) if text]
        if problems:
            self._on_main(lambda: shutil.rmtree(temporary, ignore_errors=True), "")
            raise CheckpointError(
                f"checkpoint of step {step} was not written to {self._folder}: {problems[0]}"
            )

        def commit() -> int:
            entries = [entry for _, entries in parts for entry in entries]
            return self._commit(step, temporary, plain, entries)

        total_bytes = self._on_main(commit, f"checkpoint of step {step} was not committed")
        seconds: float = self._on_main(lambda: time.monotonic() - begun, "")
        return Saved(step, self._folder / step_name(step), total_bytes, seconds)

    def load_newest(self) -> tuple[Loaded | None, list[str]]:
        """Load the newest checkpoint that is whole. Broken newer ones are set aside, never deleted.

        Returns:
            The checkpoint, or None where none is whole; and for each broken one a sentence that names it,
            says what is wrong, and where it lies now.

        Raises:
            CheckpointError: a checkpoint cannot be read now, or is of another format. Nothing was changed.
        """
        found, broken = self._on_main(self._find_newest, "checkpoints cannot be looked through")
        if found is None:
            return None, broken
        step, writers = found
        path = self._folder / step_name(step)
        plain = json.loads((path / _STATE_NAME).read_text(encoding="utf-8"))
        same_ranks = writers == self._world_size
        own = _rank_key(self._rank, "")
        reader = FileSystemReader(path)
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and (key.startswith("state") or (same_ranks and key.startswith(own)))
        }
        with _without_remark_on_single_process():
            dcp_load(tensors, storage_reader=reader, no_dist=True)
        rank_state = {key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)}
        return Loaded(step, path, join_tree(plain, tensors), rank_state if same_ranks else None), broken

    def _prepare(self, temporary: Path) -> None:
        """Make the folder to write into, without what an interrupted save left behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(_SAVING_PREFIX + "*"):
            shutil.rmtree(leftover)
        temporary.mkdir()

    def _commit(self, step: int, temporary: Path, plain: Any, entries: list[FileEntry]) -> int:
        write_atomic(temporary / _STATE_NAME, json.dumps(plain) + "\n")
        entries = [*entries, checksum(temporary / ".metadata"), checksum(temporary / _STATE_NAME)]
        manifest = Manifest(step, self._world_size, time.time(), tuple(entries))
        manifest.write(temporary)
        final = self._folder / step_name(step)
        if final.exists():
            # Whole, or it would have been set aside when the run resumed: the same state by another attempt.
            shutil.rmtree(temporary)
        else:
            temporary.rename(final)
            fsync_folder(self._folder)
        self._prune(step)
        return manifest.total_bytes

    def _prune(self, newest: int) -> None:
        """Delete all but the newest checkpoints; the one just committed is always among those kept."""
        older = [step for step in steps_in(self._folder) if step < newest]
        for step in older[: max(0, len(older) - (self._keep - 1))]:
            shutil.rmtree(self._folder / step_name(step), ignore_errors=True)

    def _find_newest(self) -> tuple[tuple[int, int] | None, list[str]]:
        """Return ((step, ranks that wrote it) or None, what was broken)."""
        broken: list[str] = []
        for step in reversed(steps_in(self._folder)):
            folder = self._folder / step_name(step)
            try:
                return (step, verified(folder).world_size), broken
            except BrokenCheckpoint as error:
                broken.append(f"{error} It was set aside as {_set_aside(folder).name}.")
        return None, broken

    def _on_main(self, action: Any, failure: str) -> Any:
        """Do `action` on rank 0 and give its result, or the error that it raised, to all ranks."""
        result, problem = None, None
        if self._rank == 0:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 (all ranks are told, and raise alike)
                problem = f"{failure} in {self._folder}: {_reason(error)}"
        if self._group is not None:
            box = [result, problem]
            dist.broadcast_object_list(box, src=0, group=self._group)
            result, problem = box
        if problem:
            raise CheckpointError(problem)
        return result

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values


@contextlib.contextmanager
def _without_remark_on_single_process() -> Iterator[None]:
    """DCP remarks that it works without peers, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _rank_key(rank: int, name: str) -> str:
    return f"rank-{rank:05d}/{name}"


def _set_aside(folder: Path) -> Path:
    for i in range(1000):
        target = folder.with_name(f"{folder.name}.broken-{i}")
        if not target.exists():
            return folder.rename(target)
    raise CheckpointError(
        f"{folder} is broken and cannot be set aside: there are 1000 broken ones of that name."
    )


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: DCP wraps each rank's error in one of its own."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"rank {rank}: {_reason(inner)}"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
