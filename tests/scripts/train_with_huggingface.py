"""A Hugging Face Trainer with dropout, accumulated gradients, evaluation and data workers."""

import sys

import torch
from disturbance import after_step
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import hpctrain.huggingface


class Disturb(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        after_step(state.global_step)


def main(result: str) -> None:
    torch.manual_seed(1)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=8, vocab_size=32)
    tokens = torch.arange(32).repeat(14)[:400].unfold(0, 8, 8)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        "never-used",
        num_train_epochs=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_steps=2,
        dataloader_num_workers=1,
        seed=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Disturb()]
    )
    hpctrain.huggingface.prepare(trainer)
    trainer.train()
    if trainer.is_world_process_zero():
        steps = torch.tensor(trainer.state.global_step)
        torch.save([*(p.detach() for p in trainer.model.parameters()), steps], result)


if __name__ == "__main__":
    main(sys.argv[1])
