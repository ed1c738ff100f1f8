"""Handwritten digits: scikit-learn's 1,797 images of 8 × 8 pixels and a small convolutional network.

Run the unchanged script in any of these ways:

    python examples/digits.py
    torchrun --standalone --nproc-per-node 2 examples/digits.py
    hpctrain submit --nodes 2 --gpus-per-node 2 --follow examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hpctrain

NUM_VALIDATION = 360


class Digits(hpctrain.Module):
    """Two convolutions and two linear layers, with 98% accuracy after 300 steps of 64 samples."""

    def __init__(self, max_steps: int, lr: float) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.lr = lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        return {
            "val_loss": F.cross_entropy(logits, labels),
            "val_accuracy": (logits.argmax(dim=1) == labels).float().mean(),
        }

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)

        def factor(step: int) -> float:
            """Warm up over 30 steps, then decay to 0. Stateless, so a run may continue with more steps."""
            return min((step + 1) / 30, 1 - step / self.max_steps)

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the validation set, with the same split in every process and every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    validation, training = order[:NUM_VALIDATION], order[NUM_VALIDATION:]
    return (
        TensorDataset(images[training], labels[training]),
        TensorDataset(images[validation], labels[validation]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all ranks")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--record-samples", action="store_true", help="record the samples of each step")
    args = parser.parse_args()

    train_dataset, val_dataset = load_data()
    trainer = hpctrain.Trainer(
        max_steps=args.max_steps,
        global_batch_size=args.batch_size,
        strategy="ddp",
        checkpoint_every=args.checkpoint_every,
        record_samples=args.record_samples,
        seed=args.seed,
        hparams=args,
    )
    trainer.fit(Digits(args.max_steps, args.lr), train_dataset, val_dataset)
    if trainer.is_main:
        print(f"validation accuracy after {trainer.step} steps: {trainer.metrics['val_accuracy']:.2%}")


if __name__ == "__main__":
    main()
