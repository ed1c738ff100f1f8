"""A training whose disk has trouble at given steps: `troubled.py LAST_STEP '{"10": "fill", "30": "free"}'`.

fill: the run's file system takes no byte more; free: it does again. hide: the checkpoints are gone. wreck: a
file is in their place; repair: it is gone. crash: the first start of the ranks ends, by kill -9 of rank 0.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from pathlib import Path

import torch

import hpctrain
from hpctrain.rundir import RunDir
from hpctrain.training import cadence

cadence._FIRST_REST_S = 0.2  # a test has no time for more


class Line(hpctrain.Module):
    def __init__(self, run: RunDir, actions: dict[str, str]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.run, self.actions, self.calls = run, actions, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        time.sleep(0.02)
        print("in step", self.calls, "x" * 200)
        if int(os.environ.get("RANK", 0)) == 0:
            if action := self.actions.get(str(self.calls)):
                getattr(self, action)()
            if self.filler.exists():
                self.fill()  # with what a save that was given up has left
        # Long lines: a file of a tmpfs grows by whole pages.
        return {"loss": self.layer(batch).pow(2).mean(), **{f"a metric {i}": 0.0 for i in range(50)}}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def filler(self) -> Path:
        return self.run.path.parent / "filler"

    def fill(self) -> None:
        with open(self.filler, "ab", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def crash(self) -> None:
        if os.environ.get("HPCTRAIN_ATTEMPT") == "0":
            os.kill(os.getpid(), 9)

    def free(self) -> None:
        self.filler.unlink()

    def hide(self) -> None:
        self.run.checkpoints.rename(self.run.path / "elsewhere")

    def wreck(self) -> None:
        self.hide()
        self.run.checkpoints.write_text("in the way")

    def repair(self) -> None:
        self.run.checkpoints.unlink()


if __name__ == "__main__":
    run = RunDir(Path(os.environ["HPCTRAIN_RUN_DIR"]))
    trainer = hpctrain.Trainer(max_steps=int(sys.argv[1]), global_batch_size=4, checkpoint_every=2, seed=1)
    trainer.fit(Line(run, json.loads(sys.argv[2])), list(torch.ones(16, 64)))
