"""A short training for fault tests: four epochs of uneven batches, dropout, a checkpoint every six steps.

Only the first attempts can be slow: those that are to be disturbed.
"""

import argparse
import json
import os
import re
import signal
import time
from pathlib import Path

import torch
from bit_flips import BitFlip
from torch import nn
from torch.distributed import PrefixStore
from torch.nn import functional as F

import hpctrain
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir

#: The phase in which to pause.
PAUSES: list[str] = []


def pause(phase: str) -> None:
    """In the chosen phase of the first attempt, create a file and sleep."""
    if phase not in PAUSES or os.environ["HPCTRAIN_ATTEMPT"] != "0":
        return
    mark = Path(os.environ["HPCTRAIN_RUN_DIR"], f"{phase}-{os.environ['RANK']}")
    if not mark.exists():
        mark.touch()
        time.sleep(2)


def never_return(mode: str) -> None:
    if mode == "loop":
        while True:
            pass
    if mode == "frozen":
        # Native code that holds Python's lock: no thread of this process can respond.
        re.match("(a+)+b", "a" * 60)
    if mode == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


class Small(hpctrain.Module):
    def __init__(self, step_s, dropout=0.1, slow_attempts=1, hang=None, slow_node=None) -> None:
        super().__init__()
        self.hang, self.slow_node = hang, slow_node
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 4))
        self.step_s = step_s if int(os.environ.get("HPCTRAIN_ATTEMPT", 0)) < slow_attempts else 0.0

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s)
        if os.environ.get("SLURMD_NODENAME") == self.slow_node:
            time.sleep(9 * self.step_s)
        if self.hang and (batch_idx, os.environ["RANK"], os.environ["HPCTRAIN_ATTEMPT"]) == (7, "1", "0"):
            never_return(self.hang)
        x, y = batch
        return {"logits": self.net(x), "y": y}

    def training_step_end(self, outputs):
        return F.cross_entropy(outputs["logits"], outputs["y"])

    def validation_step(self, batch, batch_idx):
        pause("validation")
        x, y = batch
        return {"val_accuracy": (self.net(x).argmax(1) == y).double().mean()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(203, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


class Stop(hpctrain.Callback):
    """Send SIGTERM to one rank after a step: `RANK:STEP`."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def on_step_end(self, trainer, module, metrics):
        if f"{trainer.ranks.rank}:{trainer.step}" == self.moment:
            os.kill(os.getpid(), signal.SIGTERM)


def wait_for_attack(path: str) -> None:
    """Let this rank read the answers of others only after the file exists."""
    get = PrefixStore.get

    def get_after_attack(store: PrefixStore, key: str) -> bytes:
        deadline = time.monotonic() + 60
        while "answer" in key and not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        return get(store, key)

    PrefixStore.get = get_after_attack


def slow_down_saves() -> None:
    commit = CheckpointDir.commit

    def commit_slowly(*args, **kwargs):
        pause("save")
        return commit(*args, **kwargs)

    CheckpointDir.commit = commit_slowly


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--checkpoint-every", type=int, default=6)
    parser.add_argument("--slow-attempts", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--algorithm", default="allreduce")
    parser.add_argument("--hang", help="how rank 1 does not come to the eighth step of the first attempt")
    parser.add_argument("--slow-node", help="where a step takes ten times as long")
    parser.add_argument("--grain-size", type=int, help="with elastic determinism")
    parser.add_argument("--witness-every", type=int)
    parser.add_argument("--flip-bit", type=json.loads, help="arguments of a BitFlip")
    parser.add_argument("--stop", default="", help="RANK:STEP after which a rank gets SIGTERM")
    parser.add_argument("--pause", default="", help="pause in this phase: start, validation or save")
    args = parser.parse_args()
    PAUSES.append(args.pause)
    pause("start")
    if "ATTACKED" in os.environ:
        wait_for_attack(os.environ["ATTACKED"])
    slow_down_saves()
    names = ("checkpoint_every", "algorithm", "grain_size", "witness_every")
    trainer = hpctrain.Trainer(
        max_epochs=args.epochs,
        global_batch_size=16,
        checkpoint_async=args.pause != "save",
        seed=1,
        record_samples=True,
        elastic_determinism=args.grain_size is not None,
        callbacks=[Stop(args.stop), *([BitFlip(**args.flip_bit)] if args.flip_bit else [])],
        **{name: getattr(args, name) for name in names},
    )
    data = dataset()
    module = Small(args.step_s, args.dropout, args.slow_attempts, args.hang, args.slow_node)
    trainer.fit(module, data, data)
