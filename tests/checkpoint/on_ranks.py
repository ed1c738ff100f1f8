"""What the ranks of a test do: `on_ranks.py SCENARIO FOLDER`, started as torchrun would start it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpctrain.checkpoint import store
from hpctrain.checkpoint.io import file_writer
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave
from hpctrain.errors import CheckpointError

SCENARIOS: dict[str, Callable[[Path, int, int], None]] = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def state(step: int) -> dict:
    """3 MB in all, two thirds of it in one tensor: on several ranks it has to be cut."""
    big = torch.arange(512 * 1024, dtype=torch.float32).reshape(512, 1024) + step
    return {
        "big": big,
        "small": [torch.full((100, 100), float(step + i)) for i in range(25)],
        "lr": 0.1 * step,
    }


def rank_state(rank: int) -> dict[str, torch.Tensor]:
    return {"rng": torch.tensor([rank, 7])}


def save(stored: CheckpointStore, step: int, rank: int) -> CommittedSave:
    return stored.save(step, state(step), rank_state(rank))


def raises(action: Callable[[], object], *words: str) -> str:
    """The message of the CheckpointError that `action` raises; all ranks must have got the same."""
    try:
        action()
    except CheckpointError as error:
        said = str(error)
    else:
        raise AssertionError("no CheckpointError")
    assert all(word in said for word in words), said
    return said


def same_on_all(value: object) -> None:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(each == value for each in values), values


def check_loaded(stored: CheckpointStore, step: int, rank: int | None) -> None:
    loaded, broken = stored.load_newest()
    assert loaded is not None, broken
    assert loaded.step == step, (loaded, broken)
    assert torch.equal(loaded.state["big"], state(step)["big"])
    assert all(map(torch.equal, loaded.state["small"], state(step)["small"]))
    if rank is not None:
        assert loaded.rank_state["rng"].tolist() == [rank, 7]
    else:
        assert loaded.rank_state is None


@scenario
def shared_out(folder: Path, rank: int, world_size: int) -> None:
    stored = CheckpointStore(folder, dist.group.WORLD)
    check = save(stored, 5, rank)
    same_on_all((check.step, check.path, check.total_bytes, check.world_size))
    stored.begin(6, state(6), rank_state(rank))
    assert stored.finish(30)
    assert [saved.step for saved in stored.finished()] == [6]
    check_loaded(stored, 6, rank)


@scenario
def on_another_number(folder: Path, rank: int, world_size: int) -> None:
    check_loaded(CheckpointStore(folder, dist.group.WORLD), 6, None)


@scenario
def broken_on_disk(folder: Path, rank: int, world_size: int) -> None:
    """Ranks check different files: whichever is broken, all pass the checkpoint over alike."""
    stored = CheckpointStore(folder, dist.group.WORLD, retention=Retention(last=10))
    save(stored, 1, rank)
    for step, victim in enumerate(["__0_0.distcp", "__1_0.distcp", "state.json", "manifest.json"], 2):
        path = save(stored, step, rank).path / victim
        if rank == 0:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        dist.barrier()
        loaded, broken = stored.load_newest()
        assert loaded.step == 1
        assert len(broken) == 1
        assert victim in broken[0], broken
        same_on_all(broken)


@scenario
def one_disk_is_full_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    stored = CheckpointStore(folder, dist.group.WORLD)
    save(stored, 1, rank)
    write = file_writer.FileWriter._write

    def full(writing, part):
        raise OSError(122, "Disk quota exceeded", part.name)

    if rank == 1:
        file_writer.FileWriter._write = full
    same_on_all(raises(lambda: save(stored, 2, rank), "Disk quota exceeded", "(rank 1)"))
    file_writer.FileWriter._write = write
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]
    save(stored, 3, rank)
    check_loaded(stored, 3, rank)


@scenario
def states_differ(folder: Path, rank: int, world_size: int) -> None:
    stored = CheckpointStore(folder, dist.group.WORLD)
    mine = {"x": torch.zeros(3 + rank)}
    same_on_all(raises(lambda: stored.save(1, mine, {}), "shapes of this rank's tensors", "(rank 1)"))
    raises(lambda: stored.save(1 + rank, {"x": torch.zeros(3)}, {}), "saves step 2, but rank 0 saves step 1")
    only_one = {"x": object() if rank == 1 else torch.zeros(3)}
    same_on_all(raises(lambda: stored.save(1, only_one, {}), "builtins.object", "(rank 1)"))
    save(stored, 2, rank)


@scenario
def given_up_by_one(folder: Path, rank: int, world_size: int) -> None:
    stored = CheckpointStore(folder, dist.group.WORLD)
    save(stored, 1, rank)
    hold_writing_back()
    stored.begin(2, state(2), rank_state(rank))
    if rank == 1:
        stored.abandon()
    assert stored.finish(10)
    (ended,) = stored.finished()
    assert "abandoned" in str(ended)
    same_on_all(str(ended))
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001"]


@scenario
def one_dies(folder: Path, rank: int, world_size: int) -> None:
    """The others neither hang nor commit, and say at which point they lost it."""
    stored = CheckpointStore(folder, dist.group.WORLD)
    save(stored, 1, rank)
    if rank == 1:
        hold_writing_back()
    stored.begin(2, state(2), rank_state(rank))
    if rank == 1:
        time.sleep(0.2)
        os._exit(0)
    assert stored.finish(20)
    (ended,) = stored.finished()
    assert "lost contact" in str(ended), ended
    assert "checkpoint of step 2" in str(ended)
    raises(lambda: save(stored, 3, rank), "lost contact")
    assert [path.name for path in folder.glob("step-*")] == ["step-00000001"]
    os._exit(0)  # the process group cannot be left in good order any more


@scenario
def one_stands_still(folder: Path, rank: int, world_size: int) -> None:
    """A limit ends the wait for a rank that is there and does not move."""
    store._MARGIN_S = 1.0
    stored = CheckpointStore(folder, dist.group.WORLD, patience_s=1.0)
    if rank == 1:
        hold_writing_back()
    stored.begin(1, state(1), rank_state(rank))
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    began = time.monotonic()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    assert stored.finish(20)
    assert time.monotonic() - began < 15
    (ended,) = stored.finished()
    assert "limit 2 s" in str(ended), ended
    assert rank == 1 or list(folder.glob("step-*")) == []
    os.kill(pids[1], signal.SIGCONT)
    os._exit(0)


@scenario
def one_disk_hangs_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    """All ranks are told which rank's; later saves go well once the disk takes something again."""
    stored = CheckpointStore(folder, dist.group.WORLD, patience_s=1.5)
    if rank == 1:
        let_go = hold_writing_back(heedless=True)
    same_on_all(raises(lambda: save(stored, 1, rank), "has accepted no data for 1.5 s", "(rank 1)"))
    same_on_all(raises(lambda: save(stored, 2, rank), "the disk is still hanging", "(rank 1)"))
    if rank == 1:
        let_go()
        stored._saving.hanging.ended.wait(10)
    dist.barrier()
    save(stored, 3, rank)
    check_loaded(stored, 3, rank)


@scenario
def the_last_rename_hangs_by_a_fake(folder: Path, rank: int, world_size: int) -> None:
    """No rank waits longer than agreed; what comes of the rename in the end is a whole checkpoint."""
    stored = CheckpointStore(folder, dist.group.WORLD, patience_s=1.0)
    save(stored, 1, rank)
    goes_on, commit = threading.Event(), CheckpointDir.commit

    def hang(*args: Any) -> bool:
        goes_on.wait(30)
        return commit(*args)

    CheckpointDir.commit = hang
    for step in (2, 3):
        same_on_all(
            raises(lambda step=step: save(stored, step, rank), "accepted no data for 1 s", "(rank 0)")
        )
    assert [path.name for path in folder.glob("step-*")] == ["step-00000001"]
    CheckpointDir.commit = commit
    goes_on.set()
    save(stored, 4, rank)
    dist.barrier()
    assert sorted(path.name for path in folder.glob("step-*")) == [f"step-0000000{n}" for n in (1, 2, 4)]
    assert [path.name for path in folder.glob(".*")] == []
    check_loaded(stored, 4, rank)


def hold_writing_back(heedless: bool = False) -> Callable[[], None]:
    """Writing goes on until it is told to stop, or, `heedless`, until what is returned is called."""
    free, write = [False], file_writer.FileWriter._write

    def slow(writing, part):
        while not free[0] and (heedless or not writing.stop.is_set()):
            time.sleep(0.01)
            writing.moved_at = writing.moved_at if heedless else time.monotonic()
        return write(writing, part)

    file_writer.FileWriter._write = slow

    def let_go() -> None:
        free[0], file_writer.FileWriter._write = True, write

    return let_go


def whole(step: int) -> torch.Tensor:
    return torch.arange(7 * 6, dtype=torch.float64).reshape(7, 6) + step


@scenario
def sharded(folder: Path, rank: int, world_size: int) -> None:
    """On a mesh of 2 × 2: sharded, uneven, replicated in one dimension, and cut in both."""
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    placements = {
        "rows": (Replicate(), Shard(0)),
        "columns": (Shard(1), Replicate()),
        "both": (Shard(0), Shard(1)),
        "alike": (Replicate(), Replicate()),
    }
    tree = {name: distribute_tensor(whole(1), mesh, where) for name, where in placements.items()}
    tree["plain"] = whole(2)
    stored = CheckpointStore(folder, dist.group.WORLD)
    stored.save(1, tree, {})
    back = CheckpointStore(folder, dist.group.WORLD).load_newest(like=tree)[0].state
    for name, where in placements.items():
        assert back[name].placements == where
        assert torch.equal(back[name].to_local(), tree[name].to_local()), name
    assert torch.equal(back["plain"], whole(2))
    other = {name: distribute_tensor(torch.zeros(7, 6).double(), mesh, (Shard(1), Shard(0))) for name in tree}
    moved = stored.load_newest(like=other)[0].state
    for name in placements:
        assert torch.equal(moved[name].full_tensor(), whole(1)), name


@scenario
def sharded_loaded(folder: Path, rank: int, world_size: int) -> None:
    """On another number of ranks, another way, and whole."""
    mesh = init_device_mesh("cpu", (world_size,))
    like = {"rows": distribute_tensor(torch.zeros(7, 6).double(), mesh, [Shard(1)])}
    back = CheckpointStore(folder, dist.group.WORLD).load_newest(like=like)[0].state
    assert torch.equal(back["rows"].full_tensor(), whole(1))
    assert torch.equal(back["both"], whole(1))


def with_tier(folder: Path, node: str) -> CheckpointStore:
    """A store whose second tier is that of a node: a folder that ranks of other nodes do not see."""
    tier = folder / node
    if not tier.exists():
        tier.mkdir(parents=True, exist_ok=True)
    return CheckpointStore(folder / "shared" / "run" / "checkpoints", dist.group.WORLD, second_tier=tier)


def copying_fails(folder: Path, rank: int) -> None:
    """Make saves stay in the local tier."""
    if rank == 0:
        blocked = folder / "shared" / "run" / "checkpoints"
        blocked.parent.mkdir(parents=True, exist_ok=True)
        blocked.write_text("in the way")
    dist.barrier()


def copying_works(folder: Path, rank: int) -> None:
    if rank == 0:
        (folder / "shared" / "run" / "checkpoints").unlink()
    dist.barrier()


@scenario
def node_local(folder: Path, rank: int, world_size: int) -> None:
    """Each rank on a node of its own: saved there, copied, and at the end cleaned."""
    stored = with_tier(folder, f"node-{rank}")
    copied: list[CommittedSave] = []
    for step in (1, 2):
        stored.begin(step, state(step), rank_state(rank))
        assert stored.finish(30)
        ended = stored.finished()
        copied += [each for each in ended if "shared" in each.path.parts]
        (saved,) = (each for each in ended if "shared" not in each.path.parts)
        assert (saved.step, saved.path.parent.parent) == (step, folder / f"node-{rank}")
        assert sorted(path.name for path in saved.path.glob("*.distcp")) == [f"__{rank}_0.distcp"]
    assert stored.close(clean=True) == []
    copied += stored.finished()
    assert copied[-1].path == folder / "shared/run/checkpoints/step-00000002"
    assert list((folder / f"node-{rank}").iterdir()) == []
    check_loaded(with_tier(folder, f"node-{rank}"), 2, rank)


@scenario
def only_in_the_tier(folder: Path, rank: int, world_size: int) -> None:
    """Step 2 lies on the nodes alone, as after a kill before it was copied; step 1 is shared."""
    stored = with_tier(folder, f"node-{rank}")
    save(stored, 1, rank)
    shared = folder / "shared" / "run" / "checkpoints"
    if rank == 0:
        shared.rename(folder / "aside")
    dist.barrier()
    copying_fails(folder, rank)
    stored.begin(2, state(2), rank_state(rank))
    assert stored.finish(30)
    assert stored.close() == []
    saved, failed = stored.finished()
    assert (saved.step, saved.path.parent.parent) == (2, folder / f"node-{rank}")
    assert "step 2 was not written" in str(failed)
    copying_works(folder, rank)
    if rank == 0:
        (folder / "aside").rename(shared)


@scenario
def same_nodes(folder: Path, rank: int, world_size: int) -> None:
    """The nodes are there again: their parts are brought together."""
    stored = with_tier(folder, f"node-{rank}")
    check_loaded(stored, 2, rank)
    assert (folder / "shared/run/checkpoints/step-00000002/manifest.json").exists()
    stored.begin(3, state(3), rank_state(rank))
    assert stored.close() == []
    check_loaded(stored, 3, rank)


@scenario
def brought_home(folder: Path, rank: int, world_size: int) -> None:
    """The nodes are given back: what only they have goes to the shared folder, and nothing stays on them."""
    assert with_tier(folder, f"node-{rank}").bring_home(30.0) == []
    assert list((folder / f"node-{rank}").iterdir()) == []
    check_loaded(CheckpointStore(folder / "shared/run/checkpoints", dist.group.WORLD), 2, rank)


@scenario
def nodes_exchanged(folder: Path, rank: int, world_size: int) -> None:
    """The same nodes with other ranks on them, and one more."""
    stored = with_tier(folder, f"node-{(rank + 1) % world_size}")
    check_loaded(stored, 2, None if world_size != 2 else rank)


@scenario
def a_node_is_gone(folder: Path, rank: int, world_size: int) -> None:
    """A new node has none of the parts: the newest that is whole is that in the shared folder."""
    stored = with_tier(folder, f"node-{rank}" if rank == 0 else "new-node")
    loaded, broken = stored.load_newest()
    assert loaded.step == 1
    assert "__1_0.distcp is on none of the current nodes" in broken[0], broken
    assert len(broken) == 1
    for step in (2, 3):
        stored.begin(step, state(step), rank_state(rank))
    assert stored.close() == []
    check_loaded(stored, 3, rank)


@scenario
def a_part_is_broken(folder: Path, rank: int, world_size: int) -> None:
    if rank == 1:
        (path,) = (folder / "node-1").glob("*/step-00000002/__1_0.distcp")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    stored = with_tier(folder, f"node-{rank}")
    loaded, broken = stored.load_newest()
    assert loaded.step == 1
    assert "__1_0.distcp has checksum" in broken[0], broken
    assert "step-00000002.broken-0" in broken[0]


@scenario
def one_node(folder: Path, rank: int, world_size: int) -> None:
    """All ranks see one folder: what is newest in it is loaded from there."""
    stored = with_tier(folder, "node")
    save(stored, 1, rank)
    shared = folder / "shared" / "run" / "checkpoints"
    if rank == 0:
        shared.rename(folder / "aside")
    dist.barrier()
    copying_fails(folder, rank)
    stored.begin(2, state(2), rank_state(rank))
    stored.close()
    copying_works(folder, rank)
    if rank == 0:
        (folder / "aside").rename(shared)
    dist.barrier()
    again = with_tier(folder, "node")
    loaded, _ = again.load_newest()
    assert loaded.path.parent.parent == folder / "node"
    assert torch.equal(loaded.state["big"], state(2)["big"])
    assert again.close(clean=True) == []  # by then it was copied
    assert (shared / "step-00000002" / "manifest.json").exists()
    dist.barrier()
    assert list((folder / "node").iterdir()) == []


@scenario
def a_tier_that_one_node_has_not(folder: Path, rank: int, world_size: int) -> None:
    if rank == 1:
        (folder / "node-1").write_text("no folder")
    stored = with_tier(folder, f"node-{rank}")
    stored.begin(1, state(1), rank_state(rank))
    assert stored.finish(30)
    (saved,) = stored.finished()
    assert saved.path == folder / "shared/run/checkpoints/step-00000001"
    assert "local tier" in saved.notes[0]
    assert "cannot be used" in saved.notes[0]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    SCENARIOS[name](folder, dist.get_rank(), dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
