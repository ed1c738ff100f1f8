"""Train in float64, one training after the other: `train_with_strategies.py OUT '[{SETTING: VALUE, …}, …]'`.

For each training, rank 0 writes to OUT the result or the error.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hpctrain
from hpctrain.training.data.sample_order import SampleOrder

NUM_SAMPLES, BATCH, SEED = 23, 10, 3


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


class BlocksBase:
    """Blocks whose rows no number of ranks divides, a parameter outside of them, and one without rows.

    Every rank starts with different weights: those of rank 0 count.
    """

    def __init__(
        self, *, norm=False, stop_at=None, overflow_at=None, sleep=0.0, optimizers=1, sometimes=False
    ) -> None:
        super().__init__()
        middle = [nn.BatchNorm1d(5)] if norm else []
        self.net = nn.Sequential(
            nn.Linear(6, 5), *middle, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)
        )
        self.bias = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.tensor(1.0))
        if sometimes:
            self.detour = nn.Linear(6, 1)
        self.double()
        for i, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(i + 100 * int(os.environ.get("RANK", "0")))
            nn.init.constant_(parameter, 0.5)
            if parameter.ndim > 1:
                nn.init.normal_(parameter, generator=generator)
        self.stop_at, self.overflow_at = stop_at, overflow_at
        self.steps, self.sleep, self.optimizers = 0, sleep, optimizers

    def training_step(self, batch, batch_idx):
        x, y = batch
        time.sleep(self.sleep)
        self.steps += 1
        if self.stop_at == self.steps and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        output = self.net(x) * self.scale + self.bias
        if batch_idx == 1 and hasattr(self, "detour"):
            output = output + self.detour(x)
        loss = (output - y).pow(2).mean()
        if self.overflow_at == self.steps and os.environ.get("RANK", "0") == "1":
            loss = loss * torch.inf
        return {"loss": loss, "mean_x": x.mean()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x) * self.scale + self.bias - y).pow(2).mean()

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]) * self.scale + self.bias

    def configure_optimizers(self):
        if self.optimizers == 2:
            groups = [list(self.net.parameters()), [self.scale, self.bias]]
            both = [torch.optim.AdamW(group, lr=0.02) for group in groups]
            return both, [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60) for optimizer in both]
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)


class Blocks(BlocksBase, hpctrain.Module):
    pass


def lightning_blocks() -> type:
    """Return `Blocks` as a LightningModule, which logs its validation loss."""
    import lightning

    class LightningBlocks(BlocksBase, lightning.LightningModule):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            self.log("mean_x", outputs["mean_x"])
            return outputs

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", super().validation_step(batch, batch_idx))

        def configure_optimizers(self):
            optimizer, scheduler = super().configure_optimizers()
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return LightningBlocks


class Turns(Blocks):
    def training_step(self, batch, batch_idx, optimizer_idx):
        return super().training_step(batch, batch_idx)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return zip(*samples(), strict=True)


def train_manually(num_steps: int, **kind: bool | int) -> dict[str, torch.Tensor]:
    """Return the weights from a loop without hpctrain, on one process, with whole batches.

    Of two optimizers, the second one sees the first one's changes.
    """
    module = Blocks(**kind)
    optimizers, schedulers = module.configure_optimizers()
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers, schedulers = [optimizers], [schedulers]
    x, y = samples()
    starts = list(range(0, NUM_SAMPLES, BATCH))
    for step in range(num_steps):
        epoch, batch_idx = divmod(step, len(starts))
        start = starts[batch_idx]
        indices = SampleOrder(NUM_SAMPLES, SEED).indices(epoch, start, min(start + BATCH, NUM_SAMPLES))
        for optimizer in optimizers:
            module.training_step((x[indices], y[indices]), batch_idx)["loss"].backward()
            optimizer.step()
            module.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    return module.state_dict()


train_alternately = partial(train_manually, optimizers=2)


def train(settings: dict) -> dict:
    kind = Turns if settings.pop("turns", False) else Blocks
    kind = lightning_blocks() if settings.pop("lightning", False) else kind
    names = ("norm", "stop_at", "overflow_at", "sleep", "optimizers", "sometimes")
    module = kind(**{name: settings.pop(name) for name in names if name in settings})
    steps = settings.pop("max_steps", 2)
    predicts = settings.pop("predict", False)
    data = Stream() if settings.pop("stream", False) else samples()
    try:
        trainer = hpctrain.Trainer(
            max_steps=steps, global_batch_size=BATCH, seed=SEED, record_samples=True, **settings
        )
        trainer.fit(module, data, samples())
    except hpctrain.UserError as error:
        return {"error": str(error)}
    weights = module.state_dict()
    result = {"weights": weights, "alike": equal_on_all_ranks(weights)}
    result |= {"metrics": trainer.metrics, "step": trainer.step}
    if predicts:
        result["predictions"] = torch.cat(trainer.predict(module, samples()))
    return result


def equal_on_all_ranks(weights: dict[str, torch.Tensor]) -> bool:
    if not dist.is_initialized():
        return True
    all_weights: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_weights, weights)
    return all(torch.equal(other[name], value) for other in all_weights for name, value in weights.items())


if __name__ == "__main__":
    results = [train(settings) for settings in json.loads(sys.argv[2])]
    if hpctrain.detect(os.environ).is_main:
        torch.save(results, Path(sys.argv[1]))
