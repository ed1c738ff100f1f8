"""Dropout, batch norm and validations; `--kills STEP:RANK:MOMENT …` kills one rank of each attempt."""

import argparse
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from train_classifier import dataset

import hpctrain
from hpctrain.training.saving import state_copies


class Killer:
    """Kills this rank once, in the planned moment of this attempt."""

    def __init__(self, kills: list[str]) -> None:
        attempt = int(os.environ["HPCTRAIN_ATTEMPT"])
        step, rank, moment = kills[attempt].split(":") if attempt < len(kills) else ("0", "-1", "")
        self.step, self.moment = int(step), moment if rank == os.environ["RANK"] else None
        self.random = random.Random(f"{kills} {attempt}")
        self.current_step = 1

    def pass_moment(self, moment: str, delay_s: float = 0.0) -> None:
        """Kill this process if the moment is the planned one, up to `delay_s` later."""
        if self.current_step != self.step or moment != self.moment:
            return
        self.moment = None
        if not delay_s:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=self._kill_after, args=(self.random.uniform(0, delay_s),)).start()

    def _kill_after(self, delay_s: float) -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)


class Net(hpctrain.Module):
    def __init__(self, killer: Killer, step_s: float) -> None:
        super().__init__()
        self.killer, self.step_s = killer, step_s
        self.first = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1))
        self.last = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        if x.device.type != args.device:
            raise RuntimeError(f"the batch is on {x.device}, not on {args.device}")
        time.sleep(self.step_s)
        hidden = self.first(x)
        self.killer.pass_moment("forward")
        hidden.register_hook(self._in_backward)
        return F.cross_entropy(self.last(hidden), y)

    def _in_backward(self, gradient: torch.Tensor) -> None:
        self.killer.pass_moment("backward")
        self.killer.pass_moment("allreduce", 0.003)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.killer.current_step -= 1
        self.killer.pass_moment("validation")
        self.killer.current_step += 1
        return {"val_accuracy": (self.last(self.first(x)).argmax(1) == y).double().mean()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: self.killer.pass_moment("update", 0.001))
        optimizer.register_step_post_hook(self._after_update)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def _after_update(self, *_: object) -> None:
        self.killer.pass_moment("updated", 0.002)
        self.killer.pass_moment("save", 0.03)
        self.killer.current_step += 1


class Data(torch.utils.data.Dataset):
    def __init__(self, killer: Killer | None = None) -> None:
        self.killer = killer
        self.x, self.y = dataset().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, idx: int):
        if self.killer is not None:
            self.killer.pass_moment("data")
        # Random numbers of the data are also part of the result.
        return self.x[idx] + 0.01 * torch.randn(16), self.y[idx]


class StepCounter(hpctrain.Callback):
    def __init__(self, killer: Killer) -> None:
        self.killer = killer

    def on_fit_start(self, trainer, module):
        self.killer.current_step = trainer.step + 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", nargs="*", default=[])
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--max-repeated", type=int, default=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory", type=Path, help="folder with the memory of each node")
    args = parser.parse_args()
    if args.memory is not None:
        state_copies._SHARED_MEMORY = args.memory / os.environ["SLURMD_NODENAME"]
        state_copies._SHARED_MEMORY.mkdir(exist_ok=True)
    killer = Killer(args.kills)
    trainer = hpctrain.Trainer(
        max_epochs=4,
        global_batch_size=16,
        checkpoint_every=1000,
        memory_copies=args.max_repeated,
        seed=1,
        record_samples=True,
        strategy=args.strategy,
        callbacks=[StepCounter(killer)],
    )
    trainer.fit(Net(killer, args.step_s), Data(killer), Data())
