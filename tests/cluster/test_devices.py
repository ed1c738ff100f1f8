"""The plan of devices: its rules, and that it fits what Slurm really shows to each task."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands import run_command

from hpctrain import sandbox
from hpctrain.cluster import Ranks, detect
from hpctrain.cluster.device_plan import gpu_sharing_reason, is_mig, plan_device, visible_devices
from hpctrain.cluster.gpu_placement import RankPlacement, assign_gpus, check_unique_placement
from hpctrain.errors import EnvironmentMismatch


def ranks(local_rank: int = 0, local_world_size: int = 1, environment: str = "slurm") -> Ranks:
    return Ranks(
        rank=local_rank,
        world_size=local_world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=0,
        num_nodes=1,
        master_addr="n1",
        master_port=1,
        environment=environment,
        sources={"local_world_size": "SLURM_STEP_TASKS_PER_NODE"},
    )


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("2, 3", ["2", "3"]),
        ("0,1,-1,2", ["0", "1"]),
        ("1,x,2", ["1"]),
        ("0,0", []),
        ("01,1", []),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"]),
        ("GPU-1,0", ["GPU-1"]),
        ("GPU-1,GPU-1", []),
        ("0,GPU-1", ["0"]),
        ("MIG-a,MIG-b", ["MIG-a", "MIG-b"]),
        ("MIG-GPU-1/1/0", ["MIG-GPU-1/1/0"]),
    ],
)
def test_the_list_of_visible_devices_is_read_as_cuda_reads_it(text, entries):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_devices(environ) == entries
    assert is_mig(environ) is bool(entries and entries[0].startswith("MIG"))


@pytest.mark.parametrize("text", ["", "0", "1,0", "0,-1,1", "0,0", "NoDevFiles", "0,x", "1gpu2,2"])
def test_torch_reads_the_list_of_visible_devices_alike(text, monkeypatch):
    from torch.cuda import _parse_visible_devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert [str(entry) for entry in _parse_visible_devices()] == visible_devices(
        {"CUDA_VISIBLE_DEVICES": text}
    )


@pytest.mark.parametrize(
    ("place", "visible", "variables", "index", "words"),
    [
        # All GPUs visible.
        ((0, 4), 4, {}, 0, "local rank, of 4 visible"),
        ((3, 4), 4, {"SLURM_GPUS_ON_NODE": "4"}, 3, "local rank, of 4 visible"),
        ((1, 2), 4, {"SLURM_GPUS_ON_NODE": "4"}, 1, "local rank, of 4 visible"),
        # One visible: Slurm's, or the only one.
        ((3, 4), 1, {"SLURM_GPUS_ON_NODE": "4"}, 0, "the only GPU bound to this task by Slurm, of 4"),
        ((0, 1), 1, {"SLURM_GPUS_ON_NODE": "1"}, 0, "the only visible GPU"),
        # Several of its own: --gpus-per-task=2.
        ((1, 2), 2, {"SLURM_GPUS_ON_NODE": "4"}, 0, "the first of 2 bound to this task by Slurm, of 4"),
        # Several in common: --gpu-bind=closest.
        ((3, 4), 2, {"SLURM_GPUS_ON_NODE": "4"}, 1, "one of 2 bound to this task by Slurm, of 4"),
        # None.
        ((0, 4), 0, {}, None, "no driver reports a GPU"),
        (
            (0, 4),
            0,
            {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
            None,
            "CUDA_VISIBLE_DEVICES='NoDevFiles' hides all GPUs",
        ),
        (
            (0, 4),
            0,
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            None,
            "no driver reports a GPU, although CUDA_VISIBLE_DEVICES=0,1",
        ),
        # CUDA shows one part of a GPU, whatever is listed.
        ((0, 2), 2, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, 0, "the only visible GPU"),
    ],
)
def test_plan(place, visible, variables, index, words):
    plan = plan_device(ranks(*place), variables, visible)
    assert plan.index == index
    assert words in plan.source
    assert str(plan) == ("cpu" if index is None else f"cuda:{index}")


def test_what_slurm_says_of_a_task_around_another_launcher_is_not_believed():
    """An agent of torchrun runs in a step of one task; its ranks see what it sees."""
    assert plan_device(ranks(1, 2, "torchrun"), {"SLURM_GPUS_ON_NODE": "4"}, 2).index == 1


@pytest.mark.parametrize(("visible", "on_node"), [(2, "2"), (2, None), (1, "1")])
def test_more_ranks_than_gpus_is_an_error_with_both_numbers_on_every_rank(visible, on_node):
    environ = {"SLURM_GPUS_ON_NODE": on_node} if on_node else {}
    for local_rank in range(3):
        with pytest.raises(EnvironmentMismatch) as caught:
            plan_device(ranks(local_rank, 3), environ, visible)
        message = str(caught.value)
        assert "3 ranks on this node (SLURM_STEP_TASKS_PER_NODE)" in message
        assert f"only {visible} GPU" in message
        assert "--gpus-per-node=3" in message
        assert "HPCTRAIN_SHARE_GPUS=1" in message


@pytest.mark.parametrize(
    "variables",
    [
        {"HPCTRAIN_SHARE_GPUS": "1"},
        {"SLURMD_TRES_BIND": "gpu:single:2"},
        {"SLURM_NTASKS_PER_GPU": "2"},
        {"SLURM_NTASKS_PER_TRES": "2"},
        {"SLURM_SHARDS_ON_NODE": "4"},
    ],
)
def test_who_asked_for_it_shares_gpus_in_turn(variables):
    indexes = [plan_device(ranks(i, 4), variables, 2).index for i in range(4)]
    assert indexes == [0, 1, 0, 1]
    assert "modulo 2" in plan_device(ranks(0, 4), variables, 2).source


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HPCTRAIN_SHARE_GPUS": ""},
        {"HPCTRAIN_SHARE_GPUS": "0", "SLURM_NTASKS_PER_GPU": "2"},
        {"SLURMD_TRES_BIND": "gpu:single:1"},
        {"SLURMD_TRES_BIND": "gpu:map_gpu:0,1"},
        {"SLURM_NTASKS_PER_GPU": "1"},
    ],
)
def test_who_did_not_ask_for_it_does_not_share(variables):
    assert gpu_sharing_reason(variables) is None


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(EnvironmentMismatch, match="HPCTRAIN_SHARE_GPUS is 'yes'"):
        gpu_sharing_reason({"HPCTRAIN_SHARE_GPUS": "yes"})


SHAPES = [
    "--nodes=2 --gpus-per-node=2 --ntasks-per-node=2",
    "--nodes=2 --gpus-per-node=2 --ntasks-per-node=1",
    "--nodes=2 --ntasks=4 --ntasks-per-node=2 --gpus=4",
    "--nodes=2 --ntasks-per-node=2 --gres=gpu:2",
    "--nodes=2 --ntasks=4 --gpus-per-task=1",
    "--nodes=2 --ntasks=2 --gpus-per-task=2",
    "--nodes=1 --gpus-per-node=2 --ntasks-per-gpu=1",
    "--nodes=1 --gpus-per-node=2 --ntasks-per-gpu=2",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=closest",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=none",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=single:1",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=per_task:1",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=map_gpu:0,1",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=map_gpu:1,0",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=mask_gpu:1,3",
    "--nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --distribution=cyclic",
]
#: On one node of four GPUs: two for each task, alone or with another task, in turn or one after the other.
SHAPES_OF_FOUR = [
    ("--ntasks=2 --gpus-per-task=2", True),
    ("--ntasks=4 --gpus-per-node=4 --gpu-bind=mask_gpu:0x3,0x3,0xc,0xc", True),
    # The variables of a task do not tell which others see the same GPUs: the ranks have to.
    ("--ntasks=4 --gpus-per-node=4 --gpu-bind=mask_gpu:0x3,0xc,0x3,0xc", False),
]


def seats_of_step(env: dict[str, str], shape: str, gpus_per_node: int, folder: Path) -> list[RankPlacement]:
    """Start a step of that shape; what its tasks would tell each other, were Slurm's GPUs real ones."""
    # The suite keeps GPUs out of sight by a variable that a step of --gpu-bind=none would inherit.
    command = ["env", "--unset=CUDA_VISIBLE_DEVICES", "srun", *shape.split(), f"--output={folder}/%t"]
    run_command([*command, "env", "--null"], env)
    seats = []
    for path in folder.iterdir():
        environ = dict(line.split("=", 1) for line in path.read_text().split("\0") if line)
        # What the driver would show there: the entries that Slurm wrote, or all of the node.
        listed = visible_devices(environ)
        seen = listed if listed is not None else [str(i) for i in range(gpus_per_node)]
        ranks, node = detect(environ), environ["SLURMD_NODENAME"]
        uuids = tuple(f"{node}:{entry}" for entry in seen)
        index = plan_device(ranks, environ, len(seen)).index
        seats.append(RankPlacement(ranks.rank, ranks.node_rank, ranks.local_rank, node, uuids, index))
    seats.sort(key=lambda seat: seat.rank)
    check_unique_placement(seats)
    return seats


@pytest.mark.parametrize("shape", SHAPES)
def test_tasks_get_gpus_of_their_own_wherever_slurm_gave_them_such(slurm, shape, tmp_path):
    seats = seats_of_step(slurm.env, shape, slurm.shape.gpus_per_node, tmp_path)
    taken = [seat.gpu for seat in seats]
    share = 2 if "--ntasks-per-gpu=2" in shape else 1
    assert all(gpu is not None and taken.count(gpu) == share for gpu in taken), seats


@pytest.fixture(scope="module")
def node_of_four() -> Iterator[sandbox.Sandbox]:
    name = f"four-{os.getpid()}"
    try:
        yield sandbox.up(name, nodes=1, gpus_per_node=4)
    finally:
        sandbox.down(name)


@pytest.mark.slurm
@pytest.mark.parametrize(("shape", "plan_is_enough"), SHAPES_OF_FOUR)
def test_tasks_with_several_gpus_each_take_one_that_no_other_takes(
    node_of_four, shape, plan_is_enough, tmp_path
):
    seats = seats_of_step(node_of_four.env, shape, 4, tmp_path)
    assert {len(seat.gpus) for seat in seats} == {2}
    assert (len({seat.gpu for seat in seats}) == len(seats)) is plan_is_enough
    deal = assign_gpus(seats, may_share=False)
    assert len({seat.gpus[deal.indexes[seat.rank]] for seat in seats}) == len(seats)
    if "--gpus-per-task" in shape:
        assert deal.indexes == {0: 0, 1: 0}
