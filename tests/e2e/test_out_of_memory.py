"""Runs out of memory continue with a change. There are no GPUs: training steps raise the exception."""

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import submit_script

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import os, sys, torch
from torch.utils.data import TensorDataset
import hpctrain


class Net(hpctrain.Module):
    def __init__(self, most):
        super().__init__()
        self.most, self.net = most, torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
x = torch.randn(64, 3)
hpctrain.Trainer(max_steps=6, global_batch_size=16, checkpoint_every=None).fit(
    Net(int(sys.argv[1])), TensorDataset(x, x.sum(1, keepdim=True)))
"""

HOST = """
import os
memory = os.environ.get("SLURM_MEM_PER_NODE", "unlimited")
print("memory", memory, flush=True)
if memory == "unlimited" or int(memory) < int(os.environ["NEEDED"]):
    raise MemoryError("cannot allocate")
"""


LOCAL = ["--backend=local", "--ntasks-per-node=2"]
TWO = ["--ntasks-per-node=2", "--time=10"]


@pytest.mark.long
def test_micro_batches_are_halved_until_they_fit_with_the_same_result(tmp_path):
    run, reference = (submit_script(tmp_path / most, SCRIPT, most, options=LOCAL) for most in ("2", "99"))
    assert run.wait() == 0, run.describe()
    assert [event["micro_batch_size"] for event in run.events("failure")] == [4, 2]
    assert {event["class"] for event in run.events("failure")} == {"gpu-oom"}
    log = run.dir.rank_log(2, 0).read_text()
    assert "Micro-batches are limited to 2 samples, because an earlier attempt ran out of GPU memory" in log
    assert reference.wait() == 0
    assert len(run.losses()) == 6
    assert run.losses() == pytest.approx(reference.losses(), rel=1e-5)
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["requeue", "successor"])
def test_next_job_has_more_memory(slurm, tmp_path, mode):
    options = [*TWO, "--mem=200M", f"--resume-mode={mode}", "--env=NEEDED=400", "--independent-ranks"]
    run = submit_script(tmp_path, HOST, options=options, env=slurm.env)
    assert run.wait() == 0, run.describe()
    memory = [event["memory"] for event in run.events("requeue")]
    assert memory == ["mem=300", "mem=450"], run.describe()
    seen = [run.dir.rank_log(attempt, 0).read_text().split("\n")[0] for attempt in range(3)]
    assert seen == ["memory 200", "memory 300", "memory 450"]


def test_run_ends_if_the_node_has_no_more_memory(slurm, tmp_path):
    run = submit_script(tmp_path, HOST, options=[*TWO, "--mem=0"], env=slurm.env)
    assert run.wait() == 4
    assert len(run.events("failure")) == 1
    assert "larger --mem" in run.events("finished")[0]["note"]
