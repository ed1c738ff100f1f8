"""Save one step after the other to FOLDER until the file `stop` exists; append each outcome to `said`."""

import os
import sys
import time
from pathlib import Path

import torch

from hpctrain.checkpoint.store import CheckpointStore, CommittedSave

folder = Path(sys.argv[1])
store = CheckpointStore(folder / "checkpoints", patience_s=0.3)
step = 0
while not (folder / "stop").exists():
    step += 1
    store.async_save(step, {"x": torch.full((300,), float(step))}, {})
    assert store.wait(60)
    (save,) = store.collect_outcomes()
    outcome = "saved" if isinstance(save, CommittedSave) else str(save)
    with open(folder / "said", "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(f"{step} {outcome}\n")
    time.sleep(0.05)
store.close()
