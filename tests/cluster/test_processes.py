"""Children of a process."""

from __future__ import annotations

import os
import subprocess
import threading
import time

from hpctrain.cluster.processes import child_pids


def test_children_are_found_while_threads_end():
    ended = threading.Event()

    def start_short_threads() -> None:
        while not ended.is_set():
            for thread in [threading.Thread(target=time.sleep, args=(0,)) for _ in range(20)]:
                thread.start()

    with subprocess.Popen(["sleep", "60"]) as child:
        churn = threading.Thread(target=start_short_threads)
        churn.start()
        try:
            assert all(child.pid in child_pids(os.getpid()) for _ in range(1000))
        finally:
            ended.set()
            churn.join()
            child.kill()
