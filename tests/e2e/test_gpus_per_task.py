"""Ranks with several GPUs, which are pretended here: Slurm assigns device files, and torch uses the CPU."""

import json
import sys

import pytest
from helpers.commands import environment, run_command
from helpers.node_ranks import ranks as rank
from helpers.training_runs import Run, submit_script

from hpctrain.cluster import Ranks
from hpctrain.cluster.device_plan import own_gpu_variables
from hpctrain.errors import SpecError
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.rundir import RUN_DIR_VARIABLE

pytestmark = pytest.mark.timeout(400)

SHOW = """
import json, os
names = ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "HPCTRAIN_GPUS_PER_TASK", "CUDA_VISIBLE_DEVICES"]
print(json.dumps([os.environ.get(name) for name in names]))
"""
TRAIN = """
import json, sys, torch, hpctrain
torch.manual_seed(1)
class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1).double()
        self.sizes = []
    def training_step(self, batch, batch_idx):
        return self.layer(batch)
    def training_step_end(self, output):
        self.sizes.append(len(output))
        return (output ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
module = Line()
data = torch.arange(120, dtype=torch.float64).reshape(40, 3) / 120
hpctrain.Trainer(max_steps=6, global_batch_size=12, strategy=sys.argv[1], seed=1).fit(module, data)
weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
print(json.dumps([weights.tolist(), sorted(set(module.sizes))]))
"""
SPLIT = """
import os, signal, sys, time, torch, hpctrain
devices = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
attempt = os.environ.get("HPCTRAIN_ATTEMPT")
class Halves(torch.nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.devices = first, second
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 4).to(first), torch.nn.Linear(4, 1).to(second)])
    def forward(self, batch):
        for layer, device in zip(self.layers, self.devices):
            batch = layer(batch.to(device))
        return batch
with hpctrain.session(seed=1, checkpoint_every=1) as s:
    first, second = ["cpu" for _ in devices] # no GPU is here
    model = Halves(first, second).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = s.prepare(model, optimizer)
    data = torch.arange(120, dtype=torch.float64).reshape(40, 3) / 120
    for batch in s.batches(data, global_batch_size=8, max_steps=12):
        if (attempt, s.ranks.rank, s.step) == ("0", 1, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        while (attempt, s.ranks.rank, s.step) == ("1", 0, 8):
            time.sleep(1)
        loss = model(batch).pow(2).mean()
        s.backward(loss)
        s.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def follow(folder, script: str, *options: str, environ=None) -> list[str]:
    """Return the last line of each rank's log."""
    (folder / "train.py").write_text(script)
    run_dir = folder / f"run-{len(list(folder.glob('run-*')))}"
    command = [sys.executable, "-m", "hpctrain", "submit", "--follow", "--run-dir", run_dir, *options]
    run_command(command, environ, cwd=folder, timeout=300)
    logs = sorted((run_dir / "logs/attempt-000").glob("rank-*.log"))
    return [log.read_text().splitlines()[-1] for log in logs]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("options", "ranks", "per_task"),
    [
        (["--gpus-per-node", "2", "--ntasks-per-node", "1"], 2, "2"),
        pytest.param(["--gpus-per-task", "2"], 2, "2", marks=pytest.mark.extended),
        pytest.param(["--gpus-per-node", "2"], 4, None, marks=pytest.mark.extended),
    ],
)
def test_ranks_on_slurm_see_their_gpus(slurm, tmp_path, options, ranks, per_task):
    shown = follow(tmp_path, SHOW, "--nodes", "2", *options, "train.py", environ=environment(slurm.env))
    variables = [json.loads(line) for line in shown]
    assert [values[:2] for values in variables] == [[str(rank), str(ranks)] for rank in range(ranks)]
    # The supervisor shows each process all GPUs of the step. torch.cuda.set_device selects one.
    assert {values[3] for values in variables} == {per_task}
    assert {values[4] for values in variables} == {"0,1"}


@pytest.mark.slurm
@pytest.mark.extended
def test_model_on_two_devices_of_each_rank_survives_a_kill_and_a_hang(slurm, tmp_path):
    undisturbed = Run(tmp_path / "undisturbed", {})
    (tmp_path / "split.py").write_text(SPLIT)
    run_command([sys.executable, "split.py"], {RUN_DIR_VARIABLE: str(undisturbed.path)}, cwd=tmp_path)
    options = ["--nodes=2", "--gpus-per-task=2", "--hang-timeout=5"]
    run = submit_script(tmp_path, SPLIT, options=options, env=environment(slurm.env))
    assert run.wait() == 0
    assert run.losses() == pytest.approx(undisturbed.losses(), rel=1e-12)
    killed, hung = run.events("failure")
    assert (killed["rank"], killed["class"], hung["rank"], hung["class"]) == (1, "killed", 0, "hang")
    assert len(run.events("restart")) == 2


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["dp", "ddp2"])
def test_strategies_use_all_devices_of_a_rank(tmp_path, strategy):
    local = ["--backend", "local", "--no-code-snapshot"]
    two_devices = ["--gpus-per-node", "2", "--ntasks-per-node", "1"]
    (line,) = follow(tmp_path, TRAIN, *local, *two_devices, "train.py", strategy)
    (reference,) = follow(tmp_path, TRAIN, *local, "train.py", "ddp")
    (weights, sizes), (expected, expected_sizes) = json.loads(line), json.loads(reference)
    assert weights == pytest.approx(expected, rel=1e-14, abs=1e-14)
    assert sizes == expected_sizes == [4, 12], "training_step_end receives the complete batch"


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"gpus_per_node": 8, "ntasks_per_node": 1}, (8, 1), None),
        ({"gpus_per_node": 8, "gpus_per_task": 4}, (8, 2), None),
        ({"ntasks_per_node": 2, "gpus_per_task": 4}, (8, 2), None),
        ({"gpus_per_node": "a100:8", "gpus_per_task": 2}, (8, 4), None),
        ({"gpus_per_node": 8, "ntasks_per_node": 3}, None, "8 GPUs .* and 3 ranks"),
        ({"gpus_per_node": 8, "ntasks_per_node": 2, "gpus_per_task": 2}, None, "need 4 GPUs .* is 8"),
        ({"gpus_per_task": 0}, None, "--gpus-per-task is 0"),
    ],
)
def test_shape_of_a_node(tmp_path, options, shape, message):
    (tmp_path / "train.py").touch()

    def prepare():
        options_of_run = {"backend": "local", "code_snapshot": False, **options}
        return prepare_submission(
            "train.py", [], options_of_run, environ=environment(), cwd=tmp_path, python=sys.executable
        ).spec

    if message:
        with pytest.raises(SpecError, match=message):
            prepare()
        return
    spec = prepare()
    assert (spec.gpus_per_node, spec.ntasks_per_node) == shape


def test_gpus_of_the_other_ranks_are_hidden():
    def visible(ranks: Ranks, environ: dict[str, str], num_gpus: int) -> str | None:
        return own_gpu_variables(ranks, environ, num_gpus).get("CUDA_VISIBLE_DEVICES")

    four = {"HPCTRAIN_GPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "8"}
    listed = four | {"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}
    assert visible(rank(1, 2), four, 8) == "4,5,6,7"
    assert visible(rank(1, 2), listed, 8) == "3,2,1,0"
    assert visible(rank(1, 2), four | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4) == "0,1,2,3", "bound by Slurm"
    assert visible(rank(0, 1), four | {"HPCTRAIN_GPUS_PER_TASK": "8"}, 8) == "0,1,2,3,4,5,6,7"
    assert visible(rank(0, 2), {}, 8) is None
    assert visible(rank(0, 2), four, 0) is None
