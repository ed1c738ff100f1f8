"""Fraction of runs that end within the range that `hpctrain submit` predicted.

    python benchmarks/predictions.py [--runs N] [--parallel N] [--folder FOLDER] [--slurm]

Submits runs of 20 to 120 steps to the local backend, two at a time. At random steps, the rank is killed
(every 200 steps on average) or the run is preempted (every 400 steps on average), each at most once per run.
The first runs have no prediction, because there are no earlier runs. With --folder, the runs are kept, and a
later call adds more runs. With --slurm, every second run is submitted to a sandbox (requires root and Slurm's
packages).
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from results import Results

from hpctrain import sandbox
from hpctrain.files import read_json_lines
from hpctrain.forecast.run_forecast import LEVELS, RunForecast
from hpctrain.jobs.runs import control
from hpctrain.rundir import RunDir
from hpctrain.telemetry.run_outcome import read_outcomes

SCRIPT = """
import os, signal, sys, time
import torch
import hpctrain

killed_at = int(os.environ["KILLED_AT"])

class Small(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)
        self.steps = 0

    def training_step(self, batch, batch_idx):
        time.sleep(0.05)
        self.steps += 1
        if self.steps == killed_at and os.environ["HPCTRAIN_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
steps = int(sys.argv[sys.argv.index("--max-steps") + 1])
hpctrain.Trainer(max_steps=steps, global_batch_size=16, checkpoint_every=10, seed=1).fit(Small(), data)
"""
LENGTHS = (20, 40, 80, 120)
#: Mean number of steps to a kill and to a preemption.
KILL_STEPS, PREEMPT_STEPS = 200, 400
LIMIT_S = 600.0


def train(folder: Path, number: int, box: sandbox.Sandbox | None) -> None:
    """Run one training, with the disturbances that its number determines; odd numbers run in the sandbox."""
    environ = {**os.environ, **(box.env if box else {})}
    backend = "slurm" if box and number % 2 else "local"
    draw = random.Random(number)
    length = draw.choice(LENGTHS)
    killed_at, preempted_at = (round(draw.expovariate(1 / steps)) for steps in (KILL_STEPS, PREEMPT_STEPS))
    run = RunDir(folder / "runs" / f"{number:03d}")
    submit = [sys.executable, "-m", "hpctrain", "submit", "--backend", backend, "--ntasks-per-node", "1"]
    submit += ["--no-code-snapshot", "--standby-workers", "never", "--env", f"KILLED_AT={killed_at}"]
    submit += ["--run-dir", str(run.path), str(folder / "train.py"), "--max-steps", str(length)]
    if backend == "slurm":
        submit[4:4] = ["--time", "10"]
    subprocess.run(submit, cwd=folder, env=environ, check=True, capture_output=True)
    deadline = time.monotonic() + LIMIT_S
    if preempted_at < length - 5 and preempted_at < killed_at:
        while not any(record.get("step", 0) >= preempted_at for record in read_json_lines(run.metrics)):
            if time.monotonic() > deadline:
                sys.exit(f"run {number} did not reach step {preempted_at} within {LIMIT_S:g} s")
            time.sleep(0.1)
        control.preempt([run], environ)
    wait = [sys.executable, "-m", "hpctrain", "wait", str(run.path)]
    subprocess.run(wait, env=environ, check=True, capture_output=True, timeout=LIMIT_S)


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--runs", type=int, default=60)
    results.parser.add_argument("--parallel", type=int, default=2)
    results.parser.add_argument("--folder", type=Path)
    results.parser.add_argument("--slurm", action="store_true")
    options = results.parse()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory())
        box = sandbox.up(f"bench-{os.getpid()}", nodes=1, gpus_per_node=0) if options.slurm else None
        if box:
            stack.callback(box.down)
        folder = (options.folder or Path(name)).absolute()
        runs_dir = folder / "runs"
        runs_dir.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        first = len(list(runs_dir.iterdir()))
        with ThreadPoolExecutor(options.parallel) as pool:
            list(pool.map(lambda number: train(folder, number, box), range(first, first + options.runs)))
        outcomes = read_outcomes(runs_dir)
    forecasts = [found for one in outcomes if (found := RunForecast.from_record(one.forecast))]
    ends = [
        (one.ended, forecast.end)
        for one in outcomes
        if one.state == "COMPLETED" and (forecast := RunForecast.from_record(one.forecast))
    ]
    in_range = [quantiles[0] <= ended <= quantiles[-1] for ended, quantiles in ends]
    results.add("completed runs with a prediction", len(in_range), "runs")
    results.add(
        "ended in the predicted range", 100 * statistics.fmean(in_range), "%", limit=80.0, at_least=True
    )
    results.add("ended in the predicted range, at most", 100 * statistics.fmean(in_range), "%", limit=95.0)
    widths = [each.end[-1] - each.end[0] for each in forecasts]
    results.add("width of the range", widths, "s")
    for place, level in enumerate(LEVELS):
        share = statistics.fmean(ended <= quantiles[place] for ended, quantiles in ends)
        results.add(f"ended before the {level:.0%} quantile", 100 * share, "%")
    results.finish()


if __name__ == "__main__":
    main()
