"""`train_classifier.py`, slow in every attempt, for tests that disturb several."""

from __future__ import annotations

import sys

from train_classifier import Small, dataset

import hpctrain

if __name__ == "__main__":
    data = dataset()
    module = Small(0.0)
    module.step_s = float(sys.argv[1])
    hpctrain.Trainer(max_epochs=4, global_batch_size=16, checkpoint_every=6, seed=1).fit(module, data, data)
