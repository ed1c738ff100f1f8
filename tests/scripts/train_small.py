"""A small training with batch norm: `train_small.py LAST_STEP [SETTING=VALUE…]`, alone or under torchrun."""

import json
import multiprocessing
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import hpctrain


class Small(hpctrain.Module):
    def __init__(self, norm: bool = True, step_s: float = 0.0) -> None:
        super().__init__()
        layers = [nn.Linear(16, 64), *([nn.BatchNorm1d(64)] if norm else []), nn.ReLU(), nn.Linear(64, 4)]
        self.net = nn.Sequential(*layers)
        self.step_s = step_s

    def training_step(self, batch, batch_idx):
        time.sleep(self.step_s)
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y), "mean_x": x.mean()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": F.cross_entropy(self.net(x), y), "val_mean_x": x.mean()}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 9])


def dataset(num_samples: int = 77) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


if __name__ == "__main__":
    # As in a normally started script; a process of a fork server would fork its own from another server.
    multiprocessing.set_start_method("fork", force=True)
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    norm = json.loads(options.pop("norm", "true"))
    step_s = float(options.pop("step_s", "0"))
    settings = {"checkpoint_every": 4, **{name: json.loads(value) for name, value in options.items()}}
    settings = {"global_batch_size": 32, "seed": 1} | settings
    trainer = hpctrain.Trainer(max_steps=int(sys.argv[1]), **settings)
    module = Small(norm, step_s)
    trainer.fit(module, dataset(), dataset())
    if trainer.is_main:
        checksum = sum(float(p.detach().double().sum()) for p in module.parameters())
        print(json.dumps({"metrics": trainer.metrics, "checksum": checksum, "step": trainer.step}))
