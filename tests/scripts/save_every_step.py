"""Train with a save after each step, on the ranks of a test that kills one of them in a save.

    save_every_step.py LAST_STEP RANK STEP

In the STEP-th step after its start, the rank writes its process ID to the file `traced` in the run folder and
waits for the file `go`. Each rank prints a digest of the final weights.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

import hpctrain

FOLDER = Path(os.environ["HPCTRAIN_RUN_DIR"])


class Small(hpctrain.Module):
    def __init__(self, waits_after: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
        self.waits_after = waits_after

    def training_step(self, batch, batch_idx):
        self.waits_after -= 1
        if self.waits_after == 0:
            pid = FOLDER / "pid"
            pid.write_text(str(os.getpid()))
            pid.rename(FOLDER / "traced")
            deadline = time.monotonic() + 60
            while not (FOLDER / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.002)
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    data = list(torch.randn(64, 8, generator=torch.Generator().manual_seed(3)))
    module = Small(int(sys.argv[3]) if os.environ["RANK"] == sys.argv[2] else 0)
    trainer = hpctrain.Trainer(
        max_steps=int(sys.argv[1]),
        global_batch_size=4,
        checkpoint_every=1,
        seed=1,
        local_checkpoints=os.environ.get("LOCAL_CHECKPOINTS"),
    )
    trainer.fit(module, data)
    weights = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
    print("weights", hashlib.sha256(weights).hexdigest())
