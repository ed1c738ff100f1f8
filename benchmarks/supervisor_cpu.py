"""CPU use of the supervisor, with 16 real ranks and with 10,000 simulated ranks.

    python benchmarks/supervisor_cpu.py [--seconds S]

The real ranks are idle processes on this machine, started by the local backend. The simulated ranks belong to
a launcher that reports the same events as srun. A tenth of them fails every half minute, so the handling of
failures is included. The launch is excluded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from results import Results

from hpctrain.errors import SchedulerError
from hpctrain.files import read_json_lines
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.srun_step import StepEnded, TaskExit
from hpctrain.supervisor.job_control import LocalJobControl
from hpctrain.supervisor.launch.job_step import EmitEvent
from hpctrain.supervisor.supervise import Supervisor

#: Seconds to wait after the start of the last log, until all ranks are idle.
_SETTLE_S = 2.0
_START_LIMIT_S = 120.0
#: Script of an idle rank.
_SCRIPT = "import time\ntime.sleep(600)\n"


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, including its exited children; see proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def over_real_ranks(count: int, seconds: float, folder: Path) -> float:
    """Return the CPU use of the supervisor with this number of real ranks, as a fraction of a core."""
    script, run = folder / "sleep.py", RunDir(folder / "run")
    script.write_text(_SCRIPT)
    shape = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", str(count // 2), "--no-code-snapshot"]
    words = [sys.executable, "-m", "hpctrain", "submit", *shape, "--run-dir", str(run.path), str(script)]
    subprocess.run(words, check=True, capture_output=True, cwd=folder)
    pid = int(next(event["job_id"] for event in read_json_lines(run.events) if event["kind"] == "submitted"))
    try:
        deadline = time.monotonic() + _START_LIMIT_S
        while len(run.ranks(0)) < count:
            if time.monotonic() > deadline:
                sys.exit(f"waited {_START_LIMIT_S:.0f} s for {count} ranks; {len(run.ranks(0))} have started")
            time.sleep(0.1)
        time.sleep(_SETTLE_S)
        before, begun = cpu_seconds(pid), time.monotonic()
        time.sleep(seconds)
        return (cpu_seconds(pid) - before) / (time.monotonic() - begun)
    finally:
        # A second request ends the ranks at once.
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)


class SimulatedStep:
    """A step of many simulated ranks, of which some fail at a given time; the others end with the step."""

    def __init__(self, emit: EmitEvent, failing: list[int], after_s: float) -> None:
        self._emit = emit
        self._timer = threading.Timer(after_s, self._fail, [failing])
        self._timer.start()

    def _fail(self, failing: list[int]) -> None:
        for rank in failing:
            self._emit(TaskExit(rank, None, signal.SIGKILL))

    def signal(self, number: signal.Signals) -> None:
        """Ignore the signal, because there are no processes."""

    def kill(self) -> None:
        self._emit(StepEnded(137))

    def close(self) -> None:
        self._timer.cancel()


class SimulatedLauncher:
    """Launcher that starts no processes."""

    address = "127.0.0.1"

    def __init__(self, nodes: int, ranks: int, attempt_s: float, ends: float) -> None:
        self.hosts, self.spares = [f"n{i}" for i in range(nodes)], []
        self._ranks, self._attempt_s, self._ends = ranks, attempt_s, ends

    def start(self, _command: list[str], _variables: Mapping[str, str], emit: EmitEvent) -> SimulatedStep:
        if time.monotonic() > self._ends:
            raise SchedulerError("the measurement is over")
        return SimulatedStep(emit, list(range(0, self._ranks, 10)), self._attempt_s)


def over_simulated_ranks(count: int, seconds: float, folder: Path) -> float:
    """Return the CPU use of the supervisor if a tenth of this number of ranks fails each minute."""
    run = RunDir(folder / "simulated")
    run.logs.mkdir(parents=True)
    spec = JobSpec(
        script="/x.py",
        name="x",
        run_id="x",
        run_dir=str(run.path),
        backend="local",
        nodes=count // 8,
        ntasks_per_node=8,
        max_failures=10_000,
        python="python",
        workdir="/",
    )
    job = LocalJobControl(spec, {})
    job.on_signal = {}
    run.log_event("submitted", 0, job_id=job.job_id, backend="local")
    launcher = SimulatedLauncher(count // 8, count, min(60.0, seconds / 2), time.monotonic() + seconds)
    begun, before = time.monotonic(), time.process_time()
    with contextlib.suppress(SchedulerError):
        Supervisor(run, spec, launcher, job).run()
    return (time.process_time() - before) / (time.monotonic() - begun)


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--seconds", type=float, default=60.0)
    options = results.parse()
    import torch.distributed  # noqa: F401 (excludes the import for the store from the measurement)

    with tempfile.TemporaryDirectory() as folder:
        real = over_real_ranks(16, options.seconds, Path(folder))
        simulated = over_simulated_ranks(10_000, options.seconds, Path(folder))
    results.add("16 ranks", 100 * real, "% of a core", limit=1.0)
    results.add("10,000 simulated ranks", 100 * simulated, "% of a core", limit=10.0)
    results.finish()


if __name__ == "__main__":
    main()
