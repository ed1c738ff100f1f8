"""Ranks of which one meets what the others do not: `trouble_on_ranks.py SCENARIO FOLDER`."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import on_ranks
import torch.distributed as dist
from on_ranks import check_loaded, raises, rank_state, same_on_all, scenario, state, with_tier

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave
from hpctrain.checkpoint.tier.tier_copier import TierCopier


def loop(path: Path) -> None:
    """Put what cannot be looked through in the place of a folder: a link that leads to itself."""
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(path.name)


def unreadable(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def quick(stored: CheckpointStore, step: int, rank: int) -> list[object]:
    """Save in the background; it must not take as long as a rank may keep the others waiting."""
    begun = time.monotonic()
    stored.begin(step, state(step), rank_state(rank))
    assert stored.finish(20)
    assert time.monotonic() - begun < 15
    return list(stored.finished())


@scenario
def a_folder_that_cannot_be_looked_through(folder: Path, rank: int, world_size: int) -> None:
    """Only rank 0 looks: it must not leave the others waiting."""
    stored = CheckpointStore(folder / "checkpoints", dist.group.WORLD)
    if rank == 0:
        loop(folder / "checkpoints")
    dist.barrier()
    same_on_all(raises(stored.load_newest, "Too many levels of symbolic links", "(rank 0)"))


@scenario
def a_tier_that_cannot_be_looked_through(folder: Path, rank: int, world_size: int) -> None:
    stored = with_tier(folder, f"node-{rank}")
    on_ranks.save(stored, 1, rank)
    if rank == 1:
        loop(stored._tier.site.place.folder)
    raises(stored.load_newest, "Too many levels of symbolic links", "(rank 1)")


@scenario
def a_tier_that_is_lost_between_two_saves(folder: Path, rank: int, world_size: int) -> None:
    """The save goes to the shared folder, and so does the next."""
    stored = with_tier(folder, f"node-{rank}")
    assert quick(stored, 1, rank)
    if rank == 1:
        loop(stored._tier.site.place.folder)
    dist.barrier()
    for step in (2, 3):
        told = [
            each
            for each in quick(stored, step, rank)
            if isinstance(each, CommittedSave) and each.step == step
        ]
        assert [saved.path.parent.name for saved in told] == ["checkpoints"], told
        assert "symbolic links" in told[0].notes[0]
    check_loaded(CheckpointStore(folder / "shared/run/checkpoints", dist.group.WORLD), 3, rank)


@scenario
def copying_that_fails_on_one_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    """It is told, and the next step is copied."""
    stored = with_tier(folder, f"node-{rank}")
    own_large_files = TierCopier._own_large_files
    if rank == 1:
        TierCopier._own_large_files = unreadable
    quick(stored, 1, rank)
    stored._tier._copying._thread.join(15)
    assert not stored._tier._copying._thread.is_alive()
    TierCopier._own_large_files = own_large_files
    dist.barrier()
    ended = [*quick(stored, 2, rank)]
    assert stored.close() == []
    ended += stored.finished()
    assert folder / "shared/run/checkpoints/step-00000002" in [
        each.path for each in ended if isinstance(each, CommittedSave)
    ], ended


@scenario
def telling_of_a_copy_fails_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    """Rank 0 cannot look which old checkpoints to delete: that is said, and copying goes on."""
    stored = with_tier(folder, f"node-{rank}")
    prune = CheckpointDir.prune
    CheckpointDir.prune = unreadable
    quick(stored, 1, rank)
    stored._tier._copying._thread.join(15)
    CheckpointDir.prune = prune
    dist.barrier()
    quick(stored, 2, rank)
    assert stored.close() == []
    check_loaded(CheckpointStore(folder / "shared/run/checkpoints", dist.group.WORLD), 2, rank)


@scenario
def manifests_that_a_power_cut_took(folder: Path, rank: int, world_size: int) -> None:
    """Of what lies in the memory of a node nothing has to survive; what is lost is passed over."""
    (step,) = (folder / f"node-{rank}").glob("*/step-00000002")
    (step / "manifest.json").unlink()
    dist.barrier()
    loaded, broken = with_tier(folder, f"node-{rank}").load_newest()
    assert loaded.step == 1
    assert len(broken) == 1, broken
    assert "step-00000002.broken-0" in broken[0]


@scenario
def copying_that_has_ended_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    """Where nothing leaves the nodes any more, saves go to the shared folder."""
    stored = with_tier(folder, f"node-{rank}")
    if rank == 1:
        stored._tier._copying._agreement._lost = "the ranks lost contact"
    (saved,) = quick(stored, 1, rank)
    assert saved.path.parent == folder / "shared/run/checkpoints"
    assert "copying from" in saved.notes[0]


if __name__ == "__main__":
    on_ranks.main()
