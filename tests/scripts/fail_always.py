"""Train two steps, and fail in the same way in each attempt: `fail_always.py WAY FILES STEPS`.

FILES is none, same or new in each attempt, or loaded: then the fifth attempt completes. STEPS is counted if
the step hook can count them.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

WAY, FILES, STEPS = sys.argv[1:]
RANK, ATTEMPT = os.environ["RANK"], int(os.environ["HPCTRAIN_ATTEMPT"])
IS_LAST = int(RANK) == int(os.environ["WORLD_SIZE"]) - 1
CHECKPOINTS = Path(os.environ["HPCTRAIN_RUN_DIR"], "checkpoints")


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def lose_data_worker() -> None:
    from torch.utils.data import DataLoader

    class Fatal(list):
        def __getitem__(self, index: int) -> None:
            kill(signal.SIGKILL)

    next(iter(DataLoader(Fatal([1]), num_workers=1)))


def fail() -> None:
    match WAY:
        case "exception":
            raise ValueError(f"bad value in attempt {ATTEMPT}")
        case "exit code":
            sys.exit(3)
        case "signal":
            kill(signal.SIGSEGV)
        case "kill":
            kill(signal.SIGKILL)
        case "early exit":
            os._exit(0)
        case "memory":
            raise MemoryError
        case "data worker":
            lose_data_worker()
        case "library thread":
            threading.Thread(target=os.abort).start()
    time.sleep(1000)


def make_steps() -> object:
    import torch

    layer = torch.nn.Linear(1, 1)
    if ATTEMPT:  # Pretrained weights, not those of an earlier attempt.
        layer.load_state_dict(layer.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    while True:
        layer(torch.ones(1, 1)).sum().backward()
        yield optimizer.step()


steps = make_steps() if STEPS == "counted" else iter(int, 1)
name = {"same": "last.ckpt", "new": f"{ATTEMPT}.ckpt", "loaded": "state.ckpt"}.get(FILES)
state = CHECKPOINTS / "state.ckpt"
trained = int(state.read_text()) if state.exists() else 0
for _ in range(2):
    next(steps)
    time.sleep(0.2)
    if name and RANK == "0":
        CHECKPOINTS.mkdir(exist_ok=True)
        (CHECKPOINTS / name).write_text(str(trained + 1))
if trained < 4:
    if IS_LAST:
        fail()
    time.sleep(1000)
