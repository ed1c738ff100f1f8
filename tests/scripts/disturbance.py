"""A disturbance of a run from within, for scripts that know nothing of it: `after_step(step)` in each step.

`DISTURB=requeue:5` has rank 1 of the first attempt request a requeue of the run after step 5, which sends
SIGTERM to all ranks. With `kill:5` it kills itself with SIGKILL, and with `hang:5` it never returns. With
`preempt:5` it creates the file `preempt-now` in the run folder, and the test preempts the job.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_KIND, _, _STEP = os.environ.get("DISTURB", "").partition(":")


def after_step(step: int) -> None:
    if not _KIND or os.environ["HPCTRAIN_ATTEMPT"] != "0":
        return
    if step == int(_STEP) and os.environ["RANK"] == "1":
        run = os.environ["HPCTRAIN_RUN_DIR"]
        if _KIND == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif _KIND == "hang":
            time.sleep(1000)
        elif _KIND == "preempt":
            Path(run, "preempt-now").touch()
        else:
            subprocess.Popen([sys.executable, "-m", "hpctrain", "requeue", run])
    if step >= int(_STEP):
        # The signal arrives before the last step.
        time.sleep(2 if _KIND == "preempt" else 0.3)
