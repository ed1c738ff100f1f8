"""A small GPT on bytes, trained on the source files of Python's standard library.

The text is available on every machine, so nothing is downloaded. At the end, the model generates some Python.

    python examples/gpt.py
    torchrun --standalone --nproc-per-node 2 examples/gpt.py
    hpctrain submit --nodes 1 --gpus-per-node 2 --follow examples/gpt.py
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import hpctrain

NUM_BYTES = 256


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(hpctrain.Module):
    """Predicts the next byte."""

    def __init__(self, context: int, width: int, depth: int, heads: int, max_steps: int, lr: float) -> None:
        super().__init__()
        self.context = context
        self.max_steps = max_steps
        self.lr = lr
        self.token = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte; rows of `batch` have one extra byte as target."""
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"val_loss": self.loss(batch)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)
        warmup = max(1, self.max_steps // 20)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / self.max_steps))

        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @torch.no_grad()
    def write(self, prompt: str, num_bytes: int, temperature: float = 0.7) -> str:
        """Continue `prompt` with `num_bytes` bytes, sampled one at a time."""
        tokens = torch.tensor([list(prompt.encode())], device=self.position.device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        return bytes(tokens[0].tolist()).decode(errors="replace")


class Windows(Dataset):
    """Consecutive pieces of a text: `context` input bytes, and the next byte after each as target."""

    def __init__(self, text: bytes, context: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.tokens[start : start + self.context + 1].long()


def standard_library(max_bytes: int) -> bytes:
    """Return the source text of the standard library's top-level modules, sorted by name."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:max_bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step, over all ranks")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--max-bytes", type=int, default=4_000_000)
    parser.add_argument("--precision", choices=["32", "bf16-mixed"], default="32")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    text = standard_library(args.max_bytes)
    held_out = len(text) // 50
    trainer = hpctrain.Trainer(
        max_steps=args.max_steps,
        global_batch_size=args.batch_size,
        strategy="ddp",
        precision=args.precision,
        checkpoint_every=args.checkpoint_every,
        seed=args.seed,
    )
    # Created after the trainer, which seeds the generators for the initial weights.
    model = GPT(args.context, args.width, args.depth, args.heads, args.max_steps, args.lr)
    trainer.fit(model, Windows(text[held_out:], args.context), Windows(text[:held_out], args.context))
    if trainer.is_main:
        if trainer.metrics:
            print(f"validation loss: {trainer.metrics['val_loss']:.3f} nats per byte")
        print("the model writes:\n")
        print(model.write("def main(", num_bytes=400))


if __name__ == "__main__":
    main()
