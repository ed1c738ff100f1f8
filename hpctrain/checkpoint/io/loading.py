"""Verify and load checkpoints; all functions with a coordinator or a target are collective."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.format.dcp_format import TensorReader
from hpctrain.checkpoint.format.manifest import STATE_NAME, FileEntry, Manifest
from hpctrain.checkpoint.format.state_tree import STATE_KEY, join_tree, rank_key, split_tree
from hpctrain.checkpoint.io.background_io import IoTask, wait_on_all_ranks
from hpctrain.checkpoint.io.commit import CommitTarget, shared_manifest
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps
from hpctrain.torch_compat import ShardedTensor, load_tensors

T = TypeVar("T")


@dataclass(frozen=True)
class LoadedCheckpoint:
    step: int
    path: Path
    state: Any
    rank_state: dict[str, torch.Tensor] | None
    """The saved `rank_state` of this rank; None if the checkpoint is from another number of ranks."""
    verified_step: int | None = None


@dataclass(frozen=True)
class VerifiedCheckpoint:
    folder: Path
    manifest: Manifest


def list_shared_steps(target: CommitTarget) -> Iterator[int]:
    """Collective. Return the steps in the folder that all ranks share, newest first."""
    coordinator, folder = target.coordinator, target.directory.folder
    failure = f"{folder} cannot be listed"
    steps = coordinator.run_on_all(
        lambda: list_checkpoint_steps(folder) if coordinator.is_main else [], failure
    )
    return reversed(coordinator.broadcast(steps, failure))


def check_shared(target: CommitTarget, step: int) -> VerifiedCheckpoint:
    """Collective. Verify the files of a shared checkpoint; each rank verifies a share."""
    coordinator, folder = target.coordinator, target.directory.folder / checkpoint_folder_name(step)
    read = check_on_all(coordinator, lambda _: Manifest.read(folder) if coordinator.is_main else None)
    manifest = shared_manifest(coordinator, read, folder, f"reading {folder}")
    check_files(
        coordinator, folder, manifest.shares(coordinator.world_size)[coordinator.rank], all_see_it=True
    )
    return VerifiedCheckpoint(folder, manifest)


def check_files(
    coordinator: RankCoordinator, folder: Path, share: Sequence[FileEntry], *, all_see_it: bool
) -> None:
    """Collective. Verify this rank's files; rank 0 tells damage from a problem of a node."""
    damaged: list[FileEntry] = []

    def check(on_read: Callable[[], object]) -> None:
        for entry in share:
            try:
                entry.verify(folder, on_read)
            except CorruptCheckpoint:
                damaged.append(entry)
                raise

    try:
        check_on_all(coordinator, check)
        return
    except CorruptCheckpoint as error:
        if not all_see_it:
            raise
        broken = error
    of_ranks = coordinator.all_gather([astuple(entry) for entry in damaged], "checking a checkpoint")

    def look_again(on_read: Callable[[], object]) -> None:
        for entries in of_ranks if coordinator.is_main else ():
            for entry in entries:
                FileEntry(*entry).verify(folder, on_read)

    check_on_all(coordinator, look_again)
    raise CheckpointError(
        f"{broken} Rank 0 can read the complete file, so the problem is on another node. No checkpoint "
        "was changed. Check the file system on the other nodes, then start the run again."
    )


def check_on_all(coordinator: RankCoordinator, check: Callable[[Callable[[], object]], T]) -> T:
    """Run `check`, which reports progress to its argument, on every rank; raise the worst finding on all."""
    finding: tuple[bool, str] | None = None

    def run() -> T | None:
        nonlocal finding
        try:
            return check(task.note_progress)
        except Exception as error:  # noqa: BLE001 (reported to all ranks, which all raise)
            finding = isinstance(error, CorruptCheckpoint), describe_exception(error)
            return None

    task = IoTask(run)
    failure = "checking a checkpoint"
    task.start("hpctrain-checkpoint-check")
    wait_on_all_ranks(coordinator, task, threading.Event(), timeout_s=coordinator.limit_s, failure=failure)
    finding = (False, task.error) if task.error else finding
    findings = [of_rank for of_rank in coordinator.all_gather(finding, failure) if of_rank is not None]
    for broken, text in sorted(findings, key=lambda of_rank: of_rank[0]):
        raise CorruptCheckpoint(text) if broken else CheckpointError(text)
    return task.result  # type: ignore[return-value]


def load(coordinator: RankCoordinator, verified: VerifiedCheckpoint, like: Any) -> LoadedCheckpoint:
    """Collective."""
    return coordinator.run_on_all(
        lambda: _load(coordinator, verified, like), f"{verified.folder} cannot be loaded"
    )


def _load(coordinator: RankCoordinator, verified: VerifiedCheckpoint, like: Any) -> LoadedCheckpoint:
    plain = json.loads((verified.folder / STATE_NAME).read_bytes())
    reader = TensorReader(verified.folder)
    prefix = rank_key(coordinator.rank)
    same_ranks = verified.manifest.world_size == coordinator.world_size
    distributed = {
        key: tensor
        for key, tensor in split_tree(like, STATE_KEY)[1].items()
        if isinstance(tensor, (DTensor, ShardedTensor))
    }
    tensors: dict[str, Any] = {
        key: _empty_like(distributed, key, reader.empty(key))
        for key in reader.keys([STATE_KEY, *([prefix] if same_ranks else [])])
    }
    load_tensors(tensors, reader)
    rank_state = {
        key.removeprefix(prefix): tensors.pop(key) for key in list(tensors) if key.startswith(prefix)
    }
    return LoadedCheckpoint(
        verified.manifest.step,
        verified.folder,
        join_tree(plain, tensors),
        rank_state if same_ranks else None,
        verified.manifest.verified_step,
    )


def _empty_like(distributed: Mapping[str, torch.Tensor], key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor, distributed like the tensor at its path or one of its size above that path."""
    if not distributed:
        return tensor
    steps = key.split("/")
    for length in range(len(steps), 0, -1):
        similar = distributed.get("/".join(steps[:length]))
        if similar is not None and similar.size() == tensor.size():
            return torch.empty_like(similar, dtype=tensor.dtype)
    return tensor
