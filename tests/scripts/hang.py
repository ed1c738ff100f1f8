"""Ways for a rank to hang in a step."""

from __future__ import annotations

import os
import re
import signal
import time


def never_return(mode: str) -> None:
    if mode == "loop":
        while True:
            pass
    if mode == "frozen":
        # Native code that holds Python's lock: no thread of this process can respond.
        re.match("(a+)+b", "a" * 60)
    if mode == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
