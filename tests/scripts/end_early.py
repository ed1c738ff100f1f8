"""Train ten steps that end in the fourth, or swallow a stop: `end_early.py HOW`."""

import os
import sys
import time
from contextlib import suppress

import torch

import hpctrain

MODE = sys.argv[1]
RANK = int(os.environ["RANK"])
DATA = list(torch.ones(16, 4))
OPTIONS = {"global_batch_size": 4, "checkpoint_every": 2, "seed": 1}


class Line(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        if MODE == "swallowed" and os.environ["HPCTRAIN_ATTEMPT"] == "0":
            time.sleep(1)
        if self.calls == 4:
            in_step_4()
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def in_step_4() -> None:
    if MODE == "sys.exit":
        sys.exit(0)
    if MODE == "os._exit" or (MODE == "os._exit of rank 1" and RANK == 1):
        os._exit(0)
    if MODE == "caught":
        raise ValueError("bad data")
    if MODE == "end":
        trainer.end()


def own_loop() -> None:
    with hpctrain.session(seed=1, checkpoint_every=2) as session:
        layer = torch.nn.Linear(4, 1)
        model, optimizer = session.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.01))
        for batch in session.batches(DATA, global_batch_size=4, max_steps=10):
            if session.step == 3 and MODE == "break":
                break
            optimizer.zero_grad()
            session.backward(model(batch).pow(2).mean())
            optimizer.step()


trainer = hpctrain.Trainer(max_steps=10, **OPTIONS)
if MODE in ("break", "loop"):
    own_loop()
elif MODE == "validate":
    print(trainer.validate(Line(), DATA))
else:
    with suppress(BaseException if MODE in ("swallowed", "caught") else ()):
        trainer.fit(Line(), DATA)
