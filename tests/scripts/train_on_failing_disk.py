"""Train while the disk fails: `train_on_failing_disk.py LAST_STEP '{"10": "fill", "30": "free"}'`.

fill: the run's file system is full; free: it has space again. hide: the checkpoints are gone. protect: new
files are on a read-only mount; unprotect: they are not. stop: rank 0 gets SIGTERM, and the disk has space a
second later.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

import hpctrain
from hpctrain.rundir import RunDir, checkpoint_folder_name
from hpctrain.training.saving import checkpoint_schedule

checkpoint_schedule._MIN_BACKOFF_S = 0.2  # a test has no time for more
checkpoint_schedule._POLL_INTERVAL_S = 0.1
if limit_s := os.environ.get("ROOM_LIMIT_S"):
    checkpoint_schedule.DISK_WAIT_LIMIT_S = float(limit_s)
#: Determines the size of a checkpoint.
WIDTH = int(os.environ.get("WIDTH", "64"))
#: Steps between two checkpoints.
EVERY = 2


class Line(hpctrain.Module):
    def __init__(self, run: RunDir, actions: dict[str, str]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.run, self.actions, self.calls = run, actions, 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        time.sleep(0.02)
        print("in step", self.calls, "x" * 200)
        if int(os.environ.get("RANK", 0)) == 0:
            action = self.actions.get(str(self.calls))
            if action:
                getattr(self, action)()
            if self.filler.exists():
                self.fill()  # with the space that a failed save has released
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

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(1.0, self.free).start()

    def free(self) -> None:
        self.filler.unlink()

    def hide(self) -> None:
        # A save in progress would create the folder again.
        written = self.run.checkpoints / checkpoint_folder_name((self.calls - 1) // EVERY * EVERY)
        deadline = time.monotonic() + 30
        while not written.exists():
            assert time.monotonic() < deadline, f"{written} was not written within 30 s"
            time.sleep(0.01)
        self.run.checkpoints.rename(self.run.path / "elsewhere")

    def protect(self) -> None:
        if os.environ.get("HPCTRAIN_ATTEMPT", "0") != "0":
            return
        disk = str(self.run.path.parent)
        subprocess.run(["mount", "--bind", disk, disk], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)

    def unprotect(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.run.path.parent)], check=True)


if __name__ == "__main__":
    run = RunDir(Path(os.environ["HPCTRAIN_RUN_DIR"]))
    trainer = hpctrain.Trainer(
        max_steps=int(sys.argv[1]), global_batch_size=4, checkpoint_every=EVERY, seed=1
    )
    with suppress(SystemExit if "stop" in sys.argv[2] else ()):
        trainer.fit(Line(run, json.loads(sys.argv[2])), list(torch.ones(16, WIDTH)))
