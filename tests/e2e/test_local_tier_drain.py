"""After ranks fail for good, their nodes' local tiers are drained: empty, and nothing lost."""

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import submit_script

from hpctrain.checkpoint.listing import list_checkpoints

ON_SLURM = [pytest.mark.long, pytest.mark.slurm]
SCRIPT = """
import os, sys
import torch
import hpctrain

class Doomed(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 9:
            os.kill(os.getpid(), 9)
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

settings = dict(max_steps=40, global_batch_size=4, checkpoint_every=2, local_checkpoints=sys.argv[1])
trainer = hpctrain.Trainer(**settings)
trainer.fit(Doomed(), torch.ones(80, 4))
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "backend", ["local", pytest.param("slurm", marks=[pytest.mark.long, pytest.mark.slurm])]
)
def test_local_tier_is_drained_after_failure(request, tmp_path, backend):
    env = request.getfixturevalue("slurm").env if backend == "slurm" else {}
    tier = tmp_path / "fast"
    tier.mkdir()
    options = [f"--backend={backend}", "--nodes=2", "--ntasks-per-node=1", "--max-failures=1"]
    run = submit_script(tmp_path, SCRIPT, str(tier), options=options, env=env)
    assert run.wait() == 4
    saved = [event["step"] for event in run.events("checkpoint") if event["tier"] == "local"]
    assert saved, run.describe()
    assert list(tier.iterdir()) == [], run.describe()
    listed, _ = list_checkpoints(run.dir, verify=True)
    assert listed[-1].step >= max(saved)
    assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed)
    assert f"emptied {tier}" in run.dir.supervisor_log.read_text()
    assert_no_process_left(run.path)
