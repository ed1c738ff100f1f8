"""Train with long validations: `validate_long.py LAST_STEP [rank:batch at which it stops]`."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from train_regression import Noisy, samples

import hpctrain


class Long(Noisy):
    """Draws a random number in each validated batch, and keeps the largest one in a buffer."""

    def __init__(self, stop_at: int | None) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.stop_at, self.validated = stop_at, 0

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        if self.validated == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        drawn = torch.rand((), dtype=torch.float64)
        self.largest.fill_(max(self.largest, drawn))
        return {"val_loss": self.training_step(batch, batch_idx), "drawn": drawn}


if __name__ == "__main__":
    rank, _, stop_at = sys.argv[2].partition(":") if len(sys.argv) > 2 else ("", "", "")
    is_stopped_rank = os.environ.get("RANK", "0") == rank
    trainer = hpctrain.Trainer(
        max_steps=int(sys.argv[1]),
        global_batch_size=8,
        seed=3,
        validate_every=3,
        sanity_val_batches=0,
        checkpoint_every=None,
        callbacks=[hpctrain.EarlyStopping(patience=9)],
    )
    module = Long(int(stop_at) if is_stopped_rank else None)
    try:
        trainer.fit(module, samples(), samples(400))
    finally:
        if trainer.is_main:
            print("validated", module.validated)
    state = torch.cat([value.double().flatten() for value in module.state_dict().values()]).tolist()
    everyone = [state] * trainer.ranks.world_size
    if dist.is_initialized():
        dist.all_gather_object(everyone, state)
    if trainer.is_main:
        print(json.dumps({"state": everyone, "metrics": trainer.metrics, "step": trainer.step}))
