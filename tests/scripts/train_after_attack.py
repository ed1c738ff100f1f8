"""`train_classifier.py` whose ranks read each other's addresses after the file in ATTACKED exists."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path

from hpctrain.runtime.rendezvous.signed_store import SignedStore

LIMIT_S = 60.0
get = SignedStore.get


def get_after_attack(store: SignedStore, key: str) -> bytes:
    deadline = time.monotonic() + LIMIT_S
    while "//cpu//" in key and not Path(os.environ["ATTACKED"]).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return get(store, key)


SignedStore.get = get_after_attack
runpy.run_path(str(Path(__file__).with_name("train_classifier.py")), run_name="__main__")
