"""Train a tiny GPT-2 with the Hugging Face Trainer: the script after it is ported."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hpctrain

config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64)
tokens = torch.arange(64).repeat(64).unfold(0, 32, 16)
data = [{"input_ids": row, "labels": row} for row in tokens]


class LanguageModel(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)


if __name__ == "__main__":
    trainer = hpctrain.Trainer(
        max_steps=100,
        global_batch_size=16,
        micro_batch_size=4,
        gradient_clip_norm=1.0,
        checkpoint_every=20,
        seed=1,
    )
    trainer.fit(LanguageModel(), data)
