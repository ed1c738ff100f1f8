"""Kills of ranks and nodes: a run repeats few steps, and has the undisturbed result."""

import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left
from helpers.saved_states import equal
from helpers.training_runs import Run, assert_every_sample_once, assert_undisturbed, train_on_forked_ranks

from hpctrain.checkpoint.format.dcp_format import TensorReader
from hpctrain.files import read_json_lines
from hpctrain.sandbox import Sandbox
from hpctrain.torch_compat import load_tensors

LAST_STEP, STEPS_PER_EPOCH = 52, 13
#: Steps that a failure may repeat.
MAX_REPEATED = 6
NUM_RANKS = 4
SCRIPT = SCRIPTS / "kill_at_moments.py"
OPTIONS = ["--nodes=2", "--standby-workers=0", "--env=OMP_NUM_THREADS=1", "--max-failures=20"]
#: Lets all ranks use the GPU, which the test session hides.
ON_SHARED_GPU = {"CUDA_VISIBLE_DEVICES": "0", "HPCTRAIN_SHARE_GPUS": "1"}
MOMENTS = ["data", "forward", "backward", "allreduce", "update", "updated"]

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def train_undisturbed(path: Path, *arguments: str, **env: str) -> Run:
    return train_on_forked_ranks(path, SCRIPT, [*arguments, "--kills"], ranks=NUM_RANKS, nodes=2, env=env)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    return train_undisturbed(tmp_path_factory.mktemp("reference") / "run")


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_six_killed_ranks_cost_at_most_six_steps(reference, tmp_path):
    """The script asks only for a checkpoint every 1000 steps."""
    kills = ["7:2:forward", "13:1:data", "20:0:allreduce", "26:3:validation", "33:1:updated", "40:0:update"]
    repeated = check(tmp_path, reference, kills, ["--step-s=0.2"], 6)
    assert sum(repeated.values()) <= 6, repeated


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("spare", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_lost_node_costs_at_most_one_step(slurm, free_nodes, reference, tmp_path, spare):
    """Each node has its own folder as memory, which is lost with the node."""
    run, memory = Run(tmp_path / "run", slurm.env), tmp_path / "memory"
    memory.mkdir()
    shape = ["--nodes=2", "--spare-nodes=1"] if spare else ["--nodes=1:2"]
    options = [*shape, "--gpus-per-node=2", "--env=OMP_NUM_THREADS=1", f"--run-dir={run.path}"]
    arguments = ["--step-s=0.1", f"--memory={memory}", "--max-repeated=1"]
    run.hpctrain("submit", *options, str(SCRIPT), *arguments)
    chosen = random.SystemRandom()
    run.wait_for_step(chosen.randrange(1, LAST_STEP - 5))
    time.sleep(chosen.uniform(0, 0.2))
    victim = run.events("started")[0]["hosts"][1]
    slurm.kill_node(victim)
    shutil.rmtree(memory / victim)
    assert run.wait() == 0
    assert_no_process_left(run.path)
    assert not list(memory.glob("*/*"))
    assert [event["world_size"] for event in run.events("started")] == [4, 4 if spare else 2]
    (resumed,) = run.events("resumed")
    # The last step was not complete.
    completed = list(read_json_lines(run.dir.samples(0, 0)))[-1]["step"] - 1
    assert completed - resumed["step"] <= 1, run.describe()
    if spare:
        assert_undisturbed(run, reference)
        assert equal(final_state(run), final_state(reference))
    else:  # on fewer ranks, dropout differs
        assert_every_sample_once(run)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_kills_at_random_moments_repeat_at_most_k_steps(request, tmp_path, backend, strategy, seed):
    cluster = request.getfixturevalue("slurm") if backend == "slurm" else None
    arguments = ["--strategy", strategy, "--max-repeated", str(MAX_REPEATED)]
    reference = train_undisturbed(tmp_path / "reference", *arguments)
    # Standby workers double the CPU time of a restart.
    options = ["--standby-workers=never"] if seed % 4 else []
    check(tmp_path, reference, choose_kills(seed, 10), arguments, MAX_REPEATED, cluster, options)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_kills_of_ranks_that_share_a_gpu_repeat_at_most_k_steps(tmp_path, strategy):
    arguments = ["--strategy", strategy, "--max-repeated", str(MAX_REPEATED), "--device=cuda"]
    reference = train_undisturbed(tmp_path / "reference", *arguments, **ON_SHARED_GPU)
    setup = "export " + " ".join(f"{name}={value}" for name, value in ON_SHARED_GPU.items())
    check(tmp_path, reference, choose_kills(0, 5), arguments, MAX_REPEATED, options=[f"--setup={setup}"])


def choose_kills(seed: int, count: int) -> list[str]:
    """Return kills in different steps, in order."""
    kills, chosen = [], random.Random(seed)
    for step in sorted(chosen.sample(range(2, LAST_STEP + 1), count)):
        joint = ["save", "validation"] if step % STEPS_PER_EPOCH == 0 else []
        kills.append(f"{step}:{chosen.randrange(NUM_RANKS)}:{chosen.choice(joint or MOMENTS)}")
    return kills


def check(
    folder: Path,
    reference: Run,
    kills: list[str],
    arguments: Sequence[str],
    max_repeated: int,
    cluster: Sandbox | None = None,
    options: Sequence[str] = (),
) -> dict[str, int]:
    """Run with kills; return the completed steps that each kill repeats."""
    run = Run(folder / "run", {} if cluster is None else cluster.env)
    shape = ["--gpus-per-node=2"] if cluster else ["--backend=local", "--ntasks-per-node=2"]
    options = [*OPTIONS, *shape, *options, f"--run-dir={run.path}"]
    run.hpctrain("submit", *options, str(SCRIPT), *arguments, "--kills", *kills)
    assert run.wait(60.0 + 80.0 * (1 + len(kills))) == 0, run.describe()
    assert_undisturbed(run, reference)
    resumed = {event["attempt"]: event["step"] for event in run.events("resumed")}
    repeated = {kill: completed_step(kill) - resumed.get(attempt, 0) for attempt, kill in enumerate(kills, 1)}
    assert len(run.dir.attempts()) == len(kills) + 1, run.describe()
    assert max(repeated.values()) <= max_repeated, f"{repeated}\n{run.describe()}"
    assert equal(final_state(run), final_state(reference))
    # Other tests may use the same name at the same time.
    links = Path("/dev/shm").glob(f"hpctrain-{run.path.name}-*/run")
    assert run.path.resolve() not in [link.readlink() for link in links], "files in memory"
    return repeated


def completed_step(kill: str) -> int:
    """Return the last step that the killed rank had completed."""
    step, _, moment = kill.split(":")
    return int(step) - (moment in MOMENTS and moment != "updated")


def final_state(run: Run) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, except for the random states."""
    reader = TensorReader(run.dir.checkpoints / f"step-{LAST_STEP:08d}")
    tensors = {key: reader.empty(key) for key in reader.keys(["state/"])}
    load_tensors(tensors, reader)
    return tensors
