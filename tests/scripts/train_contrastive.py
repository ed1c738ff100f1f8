"""Train with a contrastive loss and `ddp2`: `train_contrastive.py LAST_STEP BATCH OUT KIND STRATEGY`.

Every pair of the node's batch is a negative of the others. The trained weights go to the file OUT.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hpctrain


class ContrastBase:
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
        self.head = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.double()  # fifty steps would amplify the rounding of float32

    def training_step(self, batch, batch_idx):
        left, right = batch
        return {"left": self.encoder(left), "right": self.encoder(right)}

    def training_step_end(self, outputs):
        left = F.normalize(self.head(outputs["left"]), dim=1)
        right = F.normalize(self.head(outputs["right"]), dim=1)
        logits = left @ right.T * self.temperature.exp()
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits))), "pairs": float(len(logits))}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Contrast(ContrastBase, hpctrain.Module):
    pass


def lightning_contrast() -> type:
    import lightning

    return type("Contrast", (ContrastBase, lightning.LightningModule), {})


def pairs(num_samples: int = 40) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    left, noise = torch.randn(2, num_samples, 8, dtype=torch.float64, generator=generator)
    return torch.utils.data.TensorDataset(left, left + 0.3 * noise)


if __name__ == "__main__":
    last_step, batch_size, out, kind, strategy = sys.argv[1:]
    sizes = {"max_steps": int(last_step), "global_batch_size": int(batch_size)}
    trainer = hpctrain.Trainer(strategy=strategy, seed=1, **sizes)
    module = Contrast() if kind == "Module" else lightning_contrast()()
    trainer.fit(module, pairs())
    if trainer.is_main:
        torch.save(module.state_dict(), Path(out))
