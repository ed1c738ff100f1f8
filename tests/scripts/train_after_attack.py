"""`train_classifier.py` whose ranks read the answers of others after the file ATTACKED exists."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

from torch.distributed import PrefixStore

get = PrefixStore.get


def get_after_attack(store: PrefixStore, key: str) -> bytes:
    deadline = time.monotonic() + 60
    while "answer" in key and not os.path.exists(os.environ["ATTACKED"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return get(store, key)


PrefixStore.get = get_after_attack
runpy.run_path(str(Path(__file__).with_name("train_classifier.py")), run_name="__main__")
