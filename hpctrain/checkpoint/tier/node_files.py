"""Inventory and completeness check of the checkpoint files on the nodes of the current attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.loading import check_files, check_on_all
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import read_regular
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps

#: Suffix of the files that exist only on the node of the writing rank; every node has a copy of other files.
LARGE_SUFFIX = ".distcp"


@dataclass(frozen=True)
class NodeFiles:
    """The files of a step that a rank sees in the folder of its node."""

    manifest: str
    """Checksum of the manifest."""
    names: frozenset[str]
    """Files whose size matches the manifest."""


@dataclass(frozen=True)
class NodeCheckpoint:
    manifest: Manifest
    small: dict[str, bytes]
    """Content of all files except the large ones."""
    own: Sequence[FileEntry]
    """Files verified by this rank."""
    all_ranks_see_all: bool
    """True if each rank sees every file."""


def gather_node_files(target: CommitTarget) -> dict[int, list[NodeFiles | None]]:
    """Return the files in the node folders of all ranks, by step (collective)."""
    coordinator, folder = target.coordinator, target.directory.folder
    own = coordinator.run_on_all(lambda: _local_node_files(folder), f"{folder} cannot be listed")
    told = coordinator.all_gather(
        {step: (held.manifest, sorted(held.names)) for step, held in own.items()},
        "listing the local_checkpoints folder",
    )
    everyone = [
        {step: NodeFiles(manifest, frozenset(names)) for step, (manifest, names) in held.items()}
        for held in told
    ]
    steps = {step for node_files in everyone for step in node_files}
    return {step: [node_files.get(step) for node_files in everyone] for step in steps}


def find_complete(target: CommitTarget, step: int, node_files: list[NodeFiles | None]) -> NodeCheckpoint:
    """Verify the parts of a step (collective)."""
    coordinator, path = target.coordinator, target.directory.folder / checkpoint_folder_name(step)
    # If two attempts saved this step, use the version that more ranks see.
    kinds = [each.manifest for each in node_files if each is not None]
    kind = max(sorted(set(kinds)), key=kinds.count)
    holders = [rank for rank, each in enumerate(node_files) if each is not None and each.manifest == kind]
    reads = coordinator.rank == holders[0]
    own_small = check_on_all(coordinator, lambda _: read_small_files(path) if reads else None)
    small = next(each for each in coordinator.all_gather(own_small, f"reading {path}") if each is not None)
    manifest = Manifest.decode(small.get(MANIFEST_NAME, b""), path)
    shares, loads = {rank: list[FileEntry]() for rank in holders}, dict.fromkeys(holders, 0)
    for entry in manifest.files:
        seeing = [rank for rank in holders if entry.name in _names(node_files[rank])]
        if not seeing:
            raise CorruptCheckpoint(
                f"{path} is incomplete: no node of this attempt has a complete copy of {entry.name}."
            )
        rank = min(seeing, key=lambda rank: loads[rank])
        shares[rank].append(entry)
        loads[rank] += entry.bytes
    own = shares.get(coordinator.rank, [])
    check_files(coordinator, path, own, all_see_it=False)
    everything = {entry.name for entry in manifest.files}
    all_see_all = len(holders) == coordinator.world_size and all(
        _names(each) >= everything for each in node_files
    )
    return NodeCheckpoint(manifest, small, own, all_see_all)


def read_small_files(path: Path) -> dict[str, bytes]:
    """Return the content of all files except the large ones."""
    return {
        entry.name: entry.read_bytes() for entry in path.iterdir() if not entry.name.endswith(LARGE_SUFFIX)
    }


def _local_node_files(folder: Path) -> dict[int, NodeFiles]:
    own: dict[int, NodeFiles] = {}
    for step in list_checkpoint_steps(folder):
        path = folder / checkpoint_folder_name(step)
        try:
            content = read_regular(path / MANIFEST_NAME)
            files = Manifest.decode(content, path).files
            names = frozenset(
                entry.name
                for entry in files
                if (path / entry.name).is_file() and (path / entry.name).stat().st_size == entry.bytes
            )
        except (OSError, CheckpointError):
            content, names = b"", frozenset()
        own[step] = NodeFiles(xxhash.xxh3_128_hexdigest(content), names)
    return own


def _names(holding: NodeFiles | None) -> frozenset[str]:
    return frozenset() if holding is None else holding.names
