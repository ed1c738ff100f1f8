"""CPU use of the process that measures a node.

    python benchmarks/sampler.py [--seconds S]

Starts the process as in a run, and reads its CPU time from /proc. For comparison, another process only sleeps
and wakes at the same interval.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Results

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SLEEPS = "import select, sys\nwhile not select.select([sys.stdin], [], [], 1.0)[0]: pass"


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds (proc(5): fields 14 and 15 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--seconds", type=float, default=60.0)
    options = results.parse()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        measures = [sys.executable, "-m", "hpctrain.telemetry.sampling.sampler", folder, "0"]
        commands = [measures, [sys.executable, "-c", SLEEPS]]
        processes = [subprocess.Popen(command, stdin=subprocess.PIPE) for command in commands]
        deadline = time.monotonic() + 60
        while not run.telemetry(0).exists():
            if time.monotonic() > deadline:
                sys.exit("the sampler has not written anything within 60 s")
            time.sleep(0.05)
        time.sleep(1)
        before = [cpu_s(process.pid) for process in processes]
        time.sleep(options.seconds)
        after = [cpu_s(process.pid) for process in processes]
        for process in processes:
            process.communicate()
        (begin, *_) = read_json_lines(run.telemetry(0))
    ours, sleeping = (100 * (b - a) / options.seconds for a, b in zip(before, after, strict=True))
    results.add("GPUs of the node", len(begin["gpu_names"]), "")
    results.add("the process that measures", ours, "% of a core", limit=1.0)
    results.add("a process that only wakes as often", sleeping, "% of a core")
    results.finish()


if __name__ == "__main__":
    main()
