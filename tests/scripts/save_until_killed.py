"""Save until killed. A server forks such processes, so that each starts without imports.

    save_until_killed.py        then one line on stdin for each process: MODE FOLDER

It prints "ready" and answers each line with the process's id. That process makes two checkpoints, writes
"ready" to FOLDER/said, waits for FOLDER/go, and continues to save. After each completed save, it appends the
step to FOLDER/said. For the mode "for-long", see `save_for_long`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave

LAST_STEP = 5


def state(step: int) -> dict:
    return {"x": torch.full((300,), float(step)), "y": [torch.tensor(step)], "step": step}


def store(mode: str, folder: Path) -> CheckpointStore:
    tier = folder / "tier" if mode == "tier" else None
    if tier is not None:
        tier.mkdir(exist_ok=True)
    return CheckpointStore(folder / "checkpoints", retention=Retention(last=2), second_tier=tier)


def save(mode: str, folder: Path) -> None:
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stored = store(mode, folder)
    for step in range(1, LAST_STEP + 1):
        if step == 3:
            os.write(output, b"ready\n")
            while not (folder / "go").exists():
                time.sleep(0.001)
        if mode == "sync":
            stored.save(step, state(step), {})
            os.write(output, b"%d\n" % step)
        else:
            stored.async_save(step, state(step), {})
            stored.wait(60)
            for outcome in stored.collect_outcomes():
                assert isinstance(outcome, CommittedSave), outcome
                os.write(output, b"%d\n" % outcome.step)
    stored.close()
    os.write(output, b"end\n")


def save_for_long(folder: Path) -> None:
    """Save one step after the other until the file `stop` exists; append each outcome."""
    output = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stored = CheckpointStore(folder / "checkpoints", patience_s=0.3)
    step = 0
    while not (folder / "stop").exists():
        step += 1
        stored.async_save(step, state(step), {})
        assert stored.wait(60)
        (save,) = stored.collect_outcomes()
        outcome = "saved" if isinstance(save, CommittedSave) else str(save)
        os.write(output, f"{step} {outcome}\n".encode())
        time.sleep(0.05)
    stored.close()


def main() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        mode, folder = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                if mode == "for-long":
                    save_for_long(Path(folder))
                else:
                    save(mode, Path(folder))
            finally:
                os._exit(1)
        print(pid, flush=True)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
