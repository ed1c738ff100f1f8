"""An hpctrain.Module in hpctrain's Trainer."""

from __future__ import annotations

import os

from training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    SAVE_EVERY,
    SEED,
    Net,
    Samples,
    adam,
    loss_of,
    record_result,
    record_step,
)

import hpctrain

RANK = int(os.environ["RANK"])


class Module(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.samples: set[int] = set()

    def training_step(self, batch, _batch_idx):
        self.samples.update(batch[1].tolist())
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        optimizer = adam(self.parameters())
        optimizer.register_step_post_hook(self.record)
        return optimizer

    def record(self, *_) -> None:
        self.step += 1
        record_step(self.step, sorted(self.samples), RANK)
        self.samples.clear()


class CountSteps(hpctrain.Callback):
    """Sets the number of steps that are completed when the training starts or resumes."""

    def on_fit_start(self, trainer, module):
        module.step = trainer.step


if __name__ == "__main__":
    trainer = hpctrain.Trainer(
        max_steps=NUM_STEPS,
        global_batch_size=GLOBAL_BATCH,
        checkpoint_every=SAVE_EVERY,
        seed=SEED,
        elastic_determinism=True,
        grain_size=GLOBAL_BATCH // 2,
        callbacks=[CountSteps()],
    )
    module = Module()
    trainer.fit(module, Samples())
    if RANK == 0:
        record_result(module.net)
