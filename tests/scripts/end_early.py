"""Train ten steps, and exit in the fourth or swallow a stop: `end_early.py os._exit|swallowed`."""

import os
import sys
import time
from contextlib import suppress

import torch

import hpctrain

MODE = sys.argv[1]


class Line(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        if MODE == "swallowed" and os.environ["HPCTRAIN_ATTEMPT"] == "0":
            time.sleep(1)
        if self.calls == 4 and MODE == "os._exit":
            os._exit(0)
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = hpctrain.Trainer(max_steps=10, global_batch_size=4, checkpoint_every=2, seed=1)
with suppress(BaseException if MODE == "swallowed" else ()):
    trainer.fit(Line(), list(torch.ones(16, 4)))
