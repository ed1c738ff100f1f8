"""Finds the newest checkpoint that is whole, and loads it."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.agreement import Agreement, reason
from hpctrain.checkpoint.capture import STATE_KEY, rank_key
from hpctrain.checkpoint.commit import Site
from hpctrain.checkpoint.dcp_format import TensorReader
from hpctrain.checkpoint.manifest import FileEntry, Manifest
from hpctrain.checkpoint.tree import join_tree, split_tree
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import step_name, steps_in

STATE_NAME = "state.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    step: int
    path: Path
    state: Any
    """What was given to `save` as `state`."""
    rank_state: dict[str, torch.Tensor] | None
    """What this rank gave as `rank_state`; None where another number of ranks wrote the checkpoint."""


@dataclass(frozen=True)
class Whole:
    """A checkpoint whose files were all compared."""

    folder: Path
    manifest: Manifest


def newest_in(site: Site) -> Iterator[int]:
    """The steps in the folder that all ranks share, newest first. All ranks must call this.

    Raises:
        CheckpointError: on all ranks alike: the folder cannot be looked through.
    """
    agreement, folder = site.agreement, site.place.folder
    failure = f"{folder} cannot be looked through"
    steps = agreement.together(lambda: steps_in(folder) if agreement.is_main else [], failure)
    return reversed(agreement.from_main(steps, failure))


def check_shared(site: Site, step: int) -> Whole:
    """Compare the files of a checkpoint that all ranks see, each rank its share. All ranks must call this.

    Raises:
        BrokenCheckpoint: on all ranks alike: the checkpoint is not whole; the message says why.
        CheckpointError: on all ranks alike: whether it is whole cannot be told now.
    """
    agreement, folder = site.agreement, site.place.folder / step_name(step)
    read = judged(agreement, lambda: Manifest.read(folder) if agreement.is_main else None)
    manifest = agreement.from_main(read, f"reading {folder}")
    assert manifest is not None
    check_files(agreement, folder, manifest.shares(agreement.world_size)[agreement.rank], all_see_it=True)
    return Whole(folder, manifest)


def check_files(agreement: Agreement, folder: Path, own: Sequence[FileEntry], *, all_see_it: bool) -> None:
    """Compare this rank's share of the files of a checkpoint. All ranks must call this.

    Args:
        agreement: the ranks.
        folder: the checkpoint.
        own: this rank's share.
        all_see_it: whether rank 0 sees the same files, and can tell a broken file from one that only the
            node of another rank does not see.

    Raises:
        BrokenCheckpoint: on all ranks alike.
        CheckpointError: on all ranks alike.
    """

    def check() -> None:
        for entry in own:
            entry.verify(folder)

    broken: CheckpointError | None = None
    try:
        judged(agreement, check)
    except BrokenCheckpoint as error:
        if not all_see_it:
            raise
        broken = error
    if broken is None:
        return

    def look_again() -> None:
        if agreement.is_main:
            for entry in Manifest.read(folder).files:
                entry.verify(folder)

    judged(agreement, look_again)
    raise CheckpointError(
        f"{broken} Rank 0 finds the checkpoint whole, so nothing was changed. "
        "See to the file system of the other rank's node, and start again."
    )


def judged(agreement: Agreement, check: Callable[[], T]) -> T:
    """Do `check` on every rank, and give its result; where it raises on any rank, raise on all alike.

    Raises:
        BrokenCheckpoint: where that is the worst that any rank found.
        CheckpointError: where a rank could not tell.
    """
    result: Any = None
    finding: tuple[bool, str] | None = None
    try:
        result = check()
    except Exception as error:  # noqa: BLE001 (all ranks are told, and raise alike)
        finding = isinstance(error, BrokenCheckpoint), reason(error)
    findings = [found for found in agreement.all(finding, "checking a checkpoint") if found is not None]
    for broken, text in sorted(findings, key=lambda found: found[0]):
        raise BrokenCheckpoint(text) if broken else CheckpointError(text)
    return result  # type: ignore[no-any-return]


def load(agreement: Agreement, whole: Whole, like: Any) -> Loaded:
    """Load what this rank needs of a checkpoint. All ranks must call this.

    Raises:
        CheckpointError: on all ranks alike: a rank could not read it.
    """
    return agreement.together(lambda: _load(agreement, whole, like), f"{whole.folder} cannot be loaded")


def _load(agreement: Agreement, whole: Whole, like: Any) -> Loaded:
    plain = json.loads((whole.folder / STATE_NAME).read_bytes())
    reader = TensorReader(whole.folder)
    own = rank_key(agreement.rank)
    same_ranks = whole.manifest.world_size == agreement.world_size
    distributed = _distributed(like)
    tensors: dict[str, Any] = {
        key: _empty_like(distributed, key, reader.empty(key))
        for key in reader.keys([STATE_KEY, *([own] if same_ranks else [])])
    }
    with _without_remark_on_single_process():
        dcp_load(tensors, storage_reader=reader, no_dist=True)
    rank_state = {key.removeprefix(own): tensors.pop(key) for key in list(tensors) if key.startswith(own)}
    state = join_tree(plain, tensors)
    return Loaded(whole.manifest.step, whole.folder, state, rank_state if same_ranks else None)


def _distributed(like: Any) -> dict[str, torch.Tensor]:
    _, tensors = split_tree(like, STATE_KEY)
    return {key: value for key, value in tensors.items() if isinstance(value, (DTensor, ShardedTensor))}


def _empty_like(distributed: Mapping[str, torch.Tensor], key: str, whole: torch.Tensor) -> torch.Tensor:
    """Room for a tensor: distributed like that of its path, or one above that which has its size."""
    if not distributed:
        return whole
    steps = key.split("/")
    for length in range(len(steps), 0, -1):
        similar = distributed.get("/".join(steps[:length]))
        if similar is not None and similar.size() == whole.size():
            return torch.empty_like(similar, dtype=whole.dtype)
    return whole


@contextlib.contextmanager
def _without_remark_on_single_process() -> Iterator[None]:
    """DCP remarks that it works without peers, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
