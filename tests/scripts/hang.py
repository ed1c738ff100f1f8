"""Ways for a rank not to come back from a step."""

from __future__ import annotations

import os
import re
import signal
import time


def never_return(how: str) -> None:
    if how == "loop":
        while True:
            pass
    if how == "frozen":
        # Native code that holds Python's lock: nothing of this process can answer.
        re.match("(a+)+b", "a" * 60)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
