"""RPCs to slurmctld of a submission, an hour of training, a requeue and a listing of 1,000 runs.

    python benchmarks/slurm_rpcs.py [--seconds N]

Starts a sandbox (requires Linux, root and Slurm's packages) and counts the RPCs with sdiag. The count for an
hour is extrapolated from N seconds. Messages between Slurm's own daemons do not count.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import Results
from status import NUM_RUNS, make_runs

from hpctrain import sandbox
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = """
import time
import torch
import hpctrain

class Small(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
hpctrain.Trainer(max_steps=1_000_000, global_batch_size=16, seed=1).fit(Small(), data)
"""
#: Messages of Slurm's daemons and of sdiag.
DAEMON_MESSAGES = re.compile(
    "MESSAGE_.*|REQUEST_(PING|STATS_INFO|COMPLETE_.*|STEP_COMPLETE|REGISTER_.*|NODE_REGISTRATION.*|PERSIST_.*)"
)
COUNT = re.compile(r"^\s+(\w+)\s+\(\s*\d+\)\s+count:(\d+)", re.MULTILINE)
LIMIT_S = 120.0


class RpcCounter:
    """Counts the RPCs between two calls."""

    def __init__(self, environ: dict[str, str]) -> None:
        self._environ = environ
        self._last: dict[str, int] = {}
        self.new()

    def new(self) -> dict[str, int]:
        """Return the number of RPCs since the last call, by message type."""
        text = subprocess.check_output(["sdiag"], env=self._environ, text=True)
        section = text.partition("statistics by message type")[2].partition("statistics by user")[0]
        counts = {name: int(number) for name, number in COUNT.findall(section)}
        new = {name: number - self._last.get(name, 0) for name, number in counts.items()}
        self._last = counts
        return {name: n for name, n in new.items() if n and not DAEMON_MESSAGES.fullmatch(name)}


def wait_for_attempt(run: RunDir, attempt: int) -> None:
    def trains() -> bool:
        return any(line["attempt"] == attempt for line in read_json_lines(run.metrics))

    wait_until(trains, f"a step of attempt {attempt}")


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > deadline:
            sys.exit(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.2)


def measure(folder: Path, environ: dict[str, str], seconds: float) -> dict[str, dict[str, int]]:
    """Return the RPCs of each operation, by message type."""
    (folder / "train.py").write_text(SCRIPT)
    hpctrain, run = [sys.executable, "-m", "hpctrain"], RunDir(folder / "run")

    def call(*command: str) -> None:
        subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True)

    counter, found = RpcCounter(environ), {}
    call("sbatch", "--hold", "--wrap=true")
    found["sbatch"] = counter.new()
    call(
        *hpctrain,
        "submit",
        "--sbatch=hold",
        "--nodes=2",
        "--ntasks-per-node=1",
        f"--run-dir={run.path}",
        "train.py",
    )
    found["submit"] = counter.new()
    job_id = next(event["job_id"] for event in read_json_lines(run.events))
    call("scontrol", "release", job_id)
    counter.new()
    wait_for_attempt(run, 0)
    wait_until(lambda: "standby workers ready" in run.supervisor_log.read_text(), "standby workers")
    found["start"] = counter.new()
    time.sleep(seconds)
    found["train"] = counter.new()
    call(*hpctrain, "requeue", str(run.path))
    wait_for_attempt(run, 1)
    found["requeue"] = counter.new()
    call(*hpctrain, "cancel", str(run.path))
    found["cancel"] = counter.new()
    make_runs(folder / "runs", environ)
    counter.new()
    call(*hpctrain, "list")
    found["list"] = counter.new()
    return found


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--seconds", type=float, default=120.0)
    options = results.parse()
    box = sandbox.up(f"bench-{os.getpid() % 100_000}", nodes=2, gpus_per_node=0)
    try:
        with tempfile.TemporaryDirectory() as name:
            found = measure(Path(name), {**os.environ, **box.env}, options.seconds)
    finally:
        box.down()
    for name, counts in found.items():
        print(f"{name:8}", ", ".join(f"{n} {message}" for message, n in counts.items()) or "none")
    total = {name: sum(counts.values()) for name, counts in found.items()}
    results.add("RPCs of sbatch", total["sbatch"], "")
    results.add("RPCs of hpctrain submit", total["submit"], "", limit=10)
    results.add("RPCs of a job's start, with standby workers", total["start"], "", limit=8)
    results.add("RPCs of an hour of training", total["train"] * 3600 / options.seconds, "", limit=10)
    results.add("RPCs of a requeue, until the next step", total["requeue"], "", limit=40)
    results.add("RPCs of hpctrain cancel", total["cancel"], "", limit=5)
    results.add(f"RPCs of hpctrain list, {NUM_RUNS:,} runs", total["list"], "", limit=3)
    results.finish()


if __name__ == "__main__":
    main()
