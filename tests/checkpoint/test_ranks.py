"""Several ranks save together: each its share, all alike when something is wrong on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.fork_server import run_forked
from on_ranks import state

from hpctrain.checkpoint.format.write_plan import item_bytes, plan_writes
from hpctrain.checkpoint.store import CheckpointStore

#: torch remarks that it loads without peers, which is what is asked for here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SCRIPT = Path(__file__).with_name("on_ranks.py")


def on_ranks(scenario: str, folder: Path, ranks: int = 2) -> None:
    run_forked(SCRIPT, [scenario, str(folder)], {}, ranks=ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_write_about_as_much_each_and_together_all(world_size):
    tensors = {f"t{i}": torch.zeros(n, 1000) for i, n in enumerate([3, 5000, 1, 400, 0, 2000])}
    tensors |= {"scalar": torch.tensor(1.0), "wide": torch.zeros(1, 1, 3_000_000)}
    loads, covered = [], dict.fromkeys(tensors, 0)
    for rank in range(world_size):
        pieces = [piece for piece, _ in plan_writes(tensors, rank, world_size)]
        loads.append(sum(map(item_bytes, pieces)))
        for piece in pieces:
            covered[piece.key] += item_bytes(piece)
    assert covered == {key: tensor.nbytes for key, tensor in tensors.items()}
    assert max(loads) - min(loads) <= 2_000_000


def test_a_checkpoint_of_three_ranks_is_loaded_by_three_two_one_and_by_torch_alone(tmp_path):
    on_ranks("shared_out", tmp_path, ranks=3)
    folder = tmp_path / "step-00000006"
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.1 * min(sizes)
    on_ranks("on_another_number", tmp_path)
    loaded = CheckpointStore(tmp_path).load_newest()[0]
    assert torch.equal(loaded.state["big"], state(6)["big"])
    target = {"state/big": torch.empty(512, 1024), "rank-00002/rng": torch.empty(2, dtype=torch.int64)}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert torch.equal(target["state/big"], state(6)["big"])
    assert target["rank-00002/rng"].tolist() == [2, 7]


@pytest.mark.parametrize(
    "scenario",
    [
        "broken_on_disk",
        "one_disk_is_full_by_a_fake",
        "states_differ",
        "given_up_by_one",
        "one_dies",
        "one_stands_still",
        "one_disk_hangs_by_a_fake",
        "the_last_rename_hangs_by_a_fake",
    ],
)
def test_two_ranks(tmp_path, scenario):
    on_ranks(scenario, tmp_path)


def test_distributed_tensors_are_loaded_on_the_same_ranks_another_way_and_on_others(tmp_path):
    on_ranks("sharded", tmp_path, ranks=4)
    on_ranks("sharded_loaded", tmp_path, ranks=3)
    target = {"state/both": torch.empty(7, 6, dtype=torch.float64)}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000001", no_dist=True)
    assert torch.equal(target["state/both"], CheckpointStore(tmp_path).load_newest()[0].state["both"])
