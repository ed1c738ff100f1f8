"""The device plan: its rules, and its agreement with the GPUs that Slurm shows to each task."""

from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.node_ranks import ranks

from hpctrain.cluster import detect
from hpctrain.cluster.device_plan import gpu_sharing_reason, plan_device
from hpctrain.cluster.gpu_assignment import RankPlacement, check_unique_placement
from hpctrain.cluster.visible_gpus import is_mig, visible_devices
from hpctrain.errors import EnvironmentMismatch


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
def test_visible_devices_are_parsed_like_cuda(text, entries):
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_devices(environ) == entries
    assert is_mig(environ) is bool(entries and entries[0].startswith("MIG"))


FOUR_ON_NODE = {"SLURM_GPUS_ON_NODE": "4"}
BOUND = "bound to this task by Slurm; the node has 4"
HIDDEN, LISTED, SLICES = ({"CUDA_VISIBLE_DEVICES": text} for text in ("NoDevFiles", "0,1", "MIG-a,MIG-b"))


@pytest.mark.parametrize(
    ("local_ranks", "visible", "variables", "index", "source"),
    [
        # All GPUs visible.
        ((0, 4), 4, {}, 0, "the local rank; 4 GPUs are visible"),
        ((3, 4), 4, FOUR_ON_NODE, 3, "the local rank; 4 GPUs are visible"),
        ((1, 2), 4, FOUR_ON_NODE, 1, "the local rank; 4 GPUs are visible"),
        # One visible: bound by Slurm, or the only one.
        ((3, 4), 1, FOUR_ON_NODE, 0, f"the only GPU {BOUND}"),
        ((0, 1), 1, {"SLURM_GPUS_ON_NODE": "1"}, 0, "the only visible GPU"),
        # Several per task: --gpus-per-task=2.
        ((1, 2), 2, FOUR_ON_NODE, 0, f"the first of 2 GPUs {BOUND}"),
        # Several shared: --gpu-bind=closest.
        ((3, 4), 2, FOUR_ON_NODE, 1, f"one of 2 GPUs {BOUND}"),
        # None visible.
        ((0, 4), 0, {}, None, "no driver reports a GPU"),
        ((0, 4), 0, HIDDEN, None, "CUDA_VISIBLE_DEVICES='NoDevFiles' hides all GPUs"),
        ((0, 4), 0, LISTED, None, "no driver reports a GPU, although CUDA_VISIBLE_DEVICES=0,1"),
        # CUDA shows one MIG slice, whatever is listed.
        ((0, 2), 2, SLICES, 0, "the only visible GPU"),
    ],
)
def test_plan_chooses_the_expected_device(local_ranks, visible, variables, index, source):
    plan = plan_device(ranks(*local_ranks), variables, visible)
    assert plan.index == index
    assert source in plan.source
    assert str(plan) == ("cpu" if index is None else f"cuda:{index}")


@pytest.mark.parametrize(("visible", "on_node"), [(2, "2"), (2, None), (1, "1")])
def test_more_ranks_than_gpus_is_refused_on_every_rank(visible, on_node):
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
    ("variables", "is_shared"),
    [
        ({"HPCTRAIN_SHARE_GPUS": "1"}, True),
        ({"SLURMD_TRES_BIND": "gpu:single:2"}, True),
        ({"SLURM_NTASKS_PER_GPU": "2"}, True),
        ({"SLURM_NTASKS_PER_TRES": "2"}, True),
        ({"SLURM_SHARDS_ON_NODE": "4"}, True),
        ({}, False),
        ({"HPCTRAIN_SHARE_GPUS": ""}, False),
        ({"HPCTRAIN_SHARE_GPUS": "0", "SLURM_NTASKS_PER_GPU": "2"}, False),
        ({"SLURMD_TRES_BIND": "gpu:single:1"}, False),
        ({"SLURMD_TRES_BIND": "gpu:map_gpu:0,1"}, False),
        ({"SLURM_NTASKS_PER_GPU": "1"}, False),
    ],
)
def test_gpus_are_shared_round_robin_only_on_request(variables, is_shared):
    assert (gpu_sharing_reason(variables) is not None) is is_shared
    if is_shared:
        plans = [plan_device(ranks(i, 4), variables, 2) for i in range(4)]
        assert [plan.index for plan in plans] == [0, 1, 0, 1]
        assert "modulo 2" in plans[0].source


def test_invalid_sharing_switch_is_refused():
    with pytest.raises(EnvironmentMismatch, match="HPCTRAIN_SHARE_GPUS is 'yes'"):
        gpu_sharing_reason({"HPCTRAIN_SHARE_GPUS": "yes"})


SHAPES = [
    "--nodes=2 --gpus-per-node=2 --ntasks-per-node=2",
    "--nodes=2 --ntasks-per-node=2 --gres=gpu:2",
    "--nodes=2 --ntasks=4 --gpus-per-task=1",
    "--nodes=1 --gpus-per-node=2 --ntasks-per-gpu=2",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=closest",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=none",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=map_gpu:0,1",
    "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2 --gpu-bind=mask_gpu:1,3",
    "--nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --distribution=cyclic",
]


def placements_of_step(
    env: dict[str, str], shape: str, gpus_per_node: int, folder: Path
) -> list[RankPlacement]:
    """Start a step of that shape; return the placements that its tasks would exchange with real GPUs."""
    # The test session hides GPUs by a variable that a step with --gpu-bind=none would inherit.
    command = ["env", "--unset=CUDA_VISIBLE_DEVICES", "srun", *shape.split(), f"--output={folder}/%t"]
    run_command([*command, "env", "--null"], env)
    placements = []
    for path in folder.iterdir():
        environ = dict(line.split("=", 1) for line in path.read_text().split("\0") if line)
        # The driver would show the entries that Slurm wrote, or all GPUs of the node.
        listed = visible_devices(environ)
        visible = listed if listed is not None else [str(i) for i in range(gpus_per_node)]
        ranks, node = detect(environ), environ["SLURMD_NODENAME"]
        uuids = tuple(f"{node}:{entry}" for entry in visible)
        index = plan_device(ranks, environ, len(visible)).index
        placements.append(RankPlacement(ranks.rank, ranks.node_rank, ranks.local_rank, node, uuids, index))
    placements.sort(key=lambda placement: placement.rank)
    check_unique_placement(placements)
    return placements


@pytest.mark.parametrize("shape", SHAPES)
def test_tasks_use_distinct_gpus_when_slurm_binds_them(slurm, shape, tmp_path):
    placements = placements_of_step(slurm.env, shape, slurm.shape.gpus_per_node, tmp_path)
    gpus = [placement.gpu for placement in placements]
    share = 2 if "--ntasks-per-gpu=2" in shape else 1
    assert all(gpu is not None and gpus.count(gpu) == share for gpu in gpus), placements
