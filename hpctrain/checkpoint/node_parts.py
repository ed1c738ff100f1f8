"""What of the checkpoints lies in the folders of the nodes that are here now, and whether it is a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpctrain.checkpoint.commit import Site
from hpctrain.checkpoint.loading import check_files, judged
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import step_name, steps_in

#: Ends the names of the files that single ranks have written; each node has a copy of all others.
LARGE_SUFFIX = ".distcp"


@dataclass(frozen=True)
class Holding:
    """What a rank sees of one step in its node's folder."""

    manifest: str
    """Checksum of the manifest."""
    names: frozenset[str]
    """Files of the size that the manifest says."""


@dataclass(frozen=True)
class Found:
    """A checkpoint whose parts are all on some node, and were compared."""

    manifest: Manifest
    small: dict[str, bytes]
    """The content of all files but the large ones."""
    own: Sequence[FileEntry]
    """The files that this rank has compared, as its share of all."""
    all_see_all: bool
    """Whether each rank sees every file."""


def holdings(site: Site) -> dict[int, list[Holding | None]]:
    """What every rank sees in its node's folder, by step. All ranks must call this.

    Raises:
        CheckpointError: on all ranks alike: a rank cannot look through its folder.
    """
    agreement, folder = site.agreement, site.place.folder
    own = agreement.together(lambda: _own_holdings(folder), f"{folder} cannot be looked through")
    everyone = agreement.all(own, "looking through the second tier")
    steps = {step for held in everyone for step in held}
    return {step: [held.get(step) for held in everyone] for step in steps}


def find_whole(site: Site, step: int, held: list[Holding | None]) -> Found:
    """Compare the parts of a step. All ranks must call this.

    Args:
        site: where ranks save on their nodes.
        step: the step.
        held: what each rank sees of it.

    Raises:
        BrokenCheckpoint: on all ranks alike: a part is missing or changed.
        CheckpointError: on all ranks alike: whether it is whole cannot be told now.
    """
    agreement, path = site.agreement, site.place.folder / step_name(step)
    # Of two attempts that saved this step, the one that more is there of.
    kinds = [each.manifest for each in held if each is not None]
    kind = max(sorted(set(kinds)), key=kinds.count)
    holders = [rank for rank, each in enumerate(held) if each is not None and each.manifest == kind]
    reads = agreement.rank == holders[0]
    own_small = judged(agreement, lambda: small_files(path) if reads else None)
    small = next(each for each in agreement.all(own_small, f"reading {path}") if each is not None)
    manifest = Manifest.decode(small.get(MANIFEST_NAME, b""), path)
    shares, loads = {rank: list[FileEntry]() for rank in holders}, dict.fromkeys(holders, 0)
    for entry in manifest.files:
        seeing = [rank for rank in holders if entry.name in _names(held[rank])]
        if not seeing:
            raise BrokenCheckpoint(
                f"{path} is not whole: {entry.name} is on no node that is here now, or was cut short."
            )
        rank = min(seeing, key=lambda rank: loads[rank])
        shares[rank].append(entry)
        loads[rank] += entry.bytes
    own = shares.get(agreement.rank, [])
    check_files(agreement, path, own, all_see_it=False)
    everything = {entry.name for entry in manifest.files}
    all_see_all = len(holders) == agreement.world_size and all(_names(each) >= everything for each in held)
    return Found(manifest, small, own, all_see_all)


def small_files(path: Path) -> dict[str, bytes]:
    """The content of all files but the large ones."""
    return {
        entry.name: entry.read_bytes() for entry in path.iterdir() if not entry.name.endswith(LARGE_SUFFIX)
    }


def _own_holdings(folder: Path) -> dict[int, Holding]:
    own: dict[int, Holding] = {}
    for step in steps_in(folder):
        path = folder / step_name(step)
        try:
            content = (path / MANIFEST_NAME).read_bytes()
            files = Manifest.decode(content, path).files
            names = frozenset(
                entry.name
                for entry in files
                if (path / entry.name).is_file() and (path / entry.name).stat().st_size == entry.bytes
            )
        except (OSError, CheckpointError):
            content, names = b"", frozenset()
        own[step] = Holding(xxhash.xxh3_128_hexdigest(content), names)
    return own


def _names(holding: Holding | None) -> frozenset[str]:
    return frozenset() if holding is None else holding.names
