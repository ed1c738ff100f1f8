import os
import subprocess
import sys

from helpers.waiting import wait_for

from hpctrain.runtime.program.script_monitor import _cpu_seconds

BUSY = "import os, sys\nos.nice(int(sys.argv[1]))\nprint(flush=True)\nwhile True: pass"


def test_background_work_of_a_rank_is_no_progress():
    """On a busy node, telemetry takes minutes to start, during which a sleeping rank would seem busy."""

    def seconds(nice: int) -> float:
        with subprocess.Popen([sys.executable, "-c", BUSY, str(nice)], stdout=subprocess.PIPE) as child:
            try:
                child.stdout.readline()
                begin, used = _cpu_seconds(None), os.times()
                stat = f"/proc/{child.pid}/stat"
                wait_for(lambda: int(open(stat).read().split()[13]) > 50, 60, "half a second of CPU time")
                own = sum(os.times()[:2]) - sum(used[:2])
                return _cpu_seconds(None) - begin - own
            finally:
                child.kill()

    assert seconds(0) > 0.2
    assert seconds(5) < 0.1
