"""Train a tiny GPT-2 with the Hugging Face Trainer: the script before it is ported."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64)
tokens = torch.arange(64).repeat(64).unfold(0, 32, 16)
data = [{"input_ids": row, "labels": row} for row in tokens]

if __name__ == "__main__":
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        "checkpoints",
        max_steps=100,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_steps=20,
        seed=1,
        use_cpu=True,
        report_to="none",
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
