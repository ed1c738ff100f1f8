"""A Hugging Face script."""

import torch
from pace import STEPS, finish, folder, pace
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Pace(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        pace(state.global_step)


config = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=16)
data = [{"input_ids": (row := torch.arange(8) + number % 8), "labels": row} for number in range(64)]
arguments = TrainingArguments(
    folder(), max_steps=STEPS, per_device_train_batch_size=2, save_steps=5, use_cpu=True, report_to="none"
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[Pace()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder()))
finish(trainer.state.global_step)
