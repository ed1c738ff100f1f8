"""Train a compiled model: `train_compiled.py trainer|loop`; attempt 0 is killed after step 3 if KILL=1.

Each attempt starts without the graphs in Inductor's folder, as on another node. The C++ code of earlier ones
remains there, because building it takes long; on a GPU, the graphs contain their code.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

LOCAL = Path(os.environ["LOCAL_FOLDER"])
tempfile.tempdir = str(LOCAL)
for name in ("fxgraph", "aotautograd"):
    for folder in LOCAL.glob(f"torchinductor_*/{name}"):
        shutil.rmtree(folder)

import torch  # noqa: E402
from torch import nn  # noqa: E402

import hpctrain  # noqa: E402

RUN, ATTEMPT = Path(os.environ["HPCTRAIN_RUN_DIR"]), os.environ["HPCTRAIN_ATTEMPT"]
LAST_STEP = 6


class Model(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class AfterStep(hpctrain.Callback):
    def on_step_end(self, trainer, module, metrics):
        after_step(trainer.step)


def after_step(step: int) -> None:
    from torch._dynamo.utils import counters

    path = RUN / f"counters-{ATTEMPT}.json"
    if not path.exists():
        path.write_text(json.dumps(counters["inductor"]))
    if (step, ATTEMPT, os.environ.get("KILL")) == (3, "0", "1"):
        os.kill(os.getpid(), signal.SIGKILL)


def train_in_a_loop(samples: torch.Tensor) -> None:
    model = Model()
    optimizer = model.configure_optimizers()
    training_step = torch.compile(model.training_step)
    saved, first = RUN / "checkpoints" / "state.pt", 0
    if saved.exists():
        first, *states = torch.load(saved)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for step in range(first, LAST_STEP):
        loss = training_step((samples[step * 8 :][:8],), step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saved.parent.mkdir(exist_ok=True)
        torch.save((step + 1, model.state_dict(), optimizer.state_dict()), saved)
        after_step(step + 1)
    (RUN / "losses").write_text(float(loss).hex())


if __name__ == "__main__":
    torch.manual_seed(0)
    samples = torch.randn(64, 4)
    if sys.argv[1] == "loop":
        train_in_a_loop(samples)
    else:
        trainer = hpctrain.Trainer(
            max_steps=LAST_STEP,
            checkpoint_every=2,
            global_batch_size=8,
            compile=True,
            callbacks=[AfterStep()],
        )
        trainer.fit(Model(), torch.utils.data.TensorDataset(samples))
