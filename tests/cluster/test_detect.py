from __future__ import annotations

import json
import sys

import pytest
from helpers import run_command

from hpctrain.cluster import Ranks, detect
from hpctrain.cluster.step_layout import parse_tasks_per_node
from hpctrain.errors import EnvironmentMismatch

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "99",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_step_of_uneven_nodes():
    ranks = detect(STEP)
    assert (ranks.rank, ranks.world_size) == (5, 7)
    assert (ranks.local_rank, ranks.local_world_size) == (1, 3)
    assert (ranks.node_rank, ranks.num_nodes) == (1, 2)
    assert ranks.master_addr == "n1"
    assert 20_000 <= ranks.master_port < 32_000
    assert ranks.environment == "slurm"
    assert ranks.sources["world_size"] == "SLURM_STEP_NUM_TASKS"


def test_every_rank_computes_the_same_port_and_another_step_another():
    other_rank = {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert detect(STEP).master_port == detect(other_rank).master_port
    assert detect(STEP).master_port != detect({**STEP, "SLURM_STEP_ID": "1"}).master_port


@pytest.mark.parametrize("leftover", ["batch script", "interactive step"])
def test_without_a_step_there_is_one_process(leftover):
    environ = {**STEP, "SLURM_PROCID": "0"}
    if leftover == "batch script":
        del environ["SLURM_STEP_ID"]
    else:
        environ["SLURM_STEP_ID"] = str(0xFFFFFFFA)
    assert detect(environ).world_size == 1


def test_torchrun_and_torchrun_under_srun():
    for environ in (TORCHRUN, {**STEP, **TORCHRUN}):
        ranks = detect(environ)
        assert ranks.environment == "torchrun"
        assert (ranks.rank, ranks.local_rank, ranks.node_rank) == (3, 1, 1)
        assert (ranks.world_size, ranks.local_world_size, ranks.num_nodes) == (4, 2, 2)


def test_worker_variables_read_back_to_the_same_ranks():
    ranks = detect(STEP)
    assert detect({**STEP, **ranks.torch_variables()}) == ranks


def test_nothing_at_all():
    assert detect({}).environment == "local"


def test_environment_can_be_forced():
    assert detect({**STEP, "HPCTRAIN_ENVIRONMENT": "local"}).world_size == 1
    with pytest.raises(EnvironmentMismatch, match="Did you mean 'slurm'"):
        detect({"HPCTRAIN_ENVIRONMENT": "slrum"})
    with pytest.raises(EnvironmentMismatch, match="not set here"):
        detect({"HPCTRAIN_ENVIRONMENT": "torchrun"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, ["8", "SLURM_STEP_NUM_TASKS", "7", "SLURM_STEP_TASKS_PER_NODE"]),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, ["3 nodes", "SLURM_STEP_NODELIST", "for 2"]),
        ({"SLURM_LOCALID": "3"}, ["local_rank 3", "SLURM_LOCALID", "local_world_size 3"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID", "'x'"]),
        ({"SLURM_NODEID": "2"}, ["2", "SLURM_NODEID"]),
    ],
)
def test_contradictions_are_refused_with_both_values(change, words):
    with pytest.raises(EnvironmentMismatch) as caught:
        detect({**STEP, **change})
    for word in words:
        assert word in str(caught.value)


def test_half_of_torchruns_variables_is_refused():
    with pytest.raises(EnvironmentMismatch, match="LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        detect({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(("text", "counts"), [("4(x2),3", [4, 4, 3]), ("1", [1]), ("2,1(x2)", [2, 1, 1])])
def test_tasks_per_node(text, counts):
    assert parse_tasks_per_node(text) == counts


PROGRAM = """
import dataclasses, json, os
from hpctrain.cluster import detect
ranks = dataclasses.asdict(detect(os.environ))
print(json.dumps([ranks, os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"]]))
"""


@pytest.mark.parametrize(
    "shape", [["-N4", "-n8"], ["-N3", "-n7"], ["-N2", "-n6", "--distribution=cyclic"], ["-N1", "-n1"]]
)
def test_live_steps(slurm, shape):
    done = run_command(["srun", *shape, sys.executable, "-c", PROGRAM], slurm.env)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    num_tasks = int(shape[1][2:])
    assert sorted(ranks["rank"] for ranks, *_ in told) == list(range(num_tasks))
    by_node: dict[str, list[Ranks]] = {}
    for ranks, procid, node in told:
        assert ranks["rank"] == int(procid)
        assert ranks["world_size"] == num_tasks
        by_node.setdefault(node, []).append(ranks)
    for tasks in by_node.values():
        assert sorted(ranks["local_rank"] for ranks in tasks) == list(range(len(tasks)))
        assert {ranks["local_world_size"] for ranks in tasks} == {len(tasks)}
    assert len({(ranks["master_addr"], ranks["master_port"]) for ranks, *_ in told}) == 1
