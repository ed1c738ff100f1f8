"""Time from a preemption to the next trained step, on a real Slurm cluster.

    python benchmarks/preemption.py [--rounds N] [--slurm VERSION ...]

Requires root and the Slurm packages, as does `hpctrain sandbox up`. Two ranks train and receive the SIGTERM
of a preemption while their nodes remain free, so only Slurm's own delay matters. The two methods for a new
allocation alternate: a requeue, whose delay of 120 s the supervisor shortens, and a successor job, which has
no delay. No other hpctrain command runs meanwhile, because it would also shorten the delay.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import Results

from hpctrain.files import read_json_lines
from hpctrain.jobs.runs import run_control
from hpctrain.rundir import RunDir

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.slurm_versions import up_with_version

SCRIPT = """
import os, time
import torch
import hpctrain

class Small(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        time.sleep(0.05 if os.environ["HPCTRAIN_ATTEMPT"] == "0" else 0.0)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
hpctrain.Trainer(max_steps=400, global_batch_size=16, seed=1).fit(Small(), data)
"""
LIMIT_S = 100.0


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=3)
    results.parser.add_argument("--slurm", nargs="+", default=["installed"], metavar="VERSION")
    options = results.parse()
    for version in options.slurm:
        for way, rounds in measure_version(version, options.rounds).items():
            for part in rounds[0]:
                last = part == "released until first step"
                seconds = [parts[part] for parts in rounds]
                name = f"Slurm {version}, {way}: {part}"
                results.add(name, seconds, "s", limit=15.0 if last else None, headline=last)
    results.finish()


def measure_version(version: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the results of each method for a new allocation."""
    found: dict[str, list[dict[str, float]]] = {"requeue": [], "successor": []}
    slurm = "" if version == "installed" else version
    cluster = up_with_version(f"bench-{os.getpid() % 100_000}", nodes=2, gpus_per_node=1, slurm=slurm)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            script = Path(scratch, "train.py")
            script.write_text(SCRIPT)
            for number in range(rounds):
                for way, results in found.items():
                    results.append(measure(script, Path(scratch, f"{way}-{number}"), way, cluster.env))
    finally:
        cluster.down()
    return found


def measure(script: Path, path: Path, way: str, env: dict[str, str]) -> dict[str, float]:
    """Return the seconds from the signal to each event."""
    run, environ = RunDir(path), {**os.environ, **env}
    hpctrain = [sys.executable, "-m", "hpctrain"]
    shape = ["--nodes", "2", "--gpus-per-node", "1", "--no-code-snapshot", "--resume-mode", way]
    submit = [*hpctrain, "submit", *shape, "--run-dir", str(path), str(script)]
    subprocess.run(submit, env=environ, cwd=script.parent, check=True, capture_output=True)
    wait_for(lambda: steps(run, 0) > 20, f"steps of {path}")
    preempted = time.time()
    run_control.preempt([run], environ)
    wait_for(lambda: steps(run, 1) > 0, f"steps of {path} after the preemption")
    subprocess.run(
        [*hpctrain, "wait", str(path)], env=environ, check=True, capture_output=True, timeout=LIMIT_S
    )
    events = list(read_json_lines(run.events))
    at = {
        "state saved": next(event["time"] for event in events if event["kind"] == "signal"),
        "allocation released": next(event["time"] for event in events if event["kind"] == "requeue"),
        "ranks started": [event["time"] for event in events if event["kind"] == "started"][1],
        "first step": min(line["time"] for line in read_json_lines(run.metrics) if line["attempt"] == 1),
    }
    parts = {what: moment - preempted for what, moment in at.items()}
    return {**parts, "released until first step": at["first step"] - at["allocation released"]}


def steps(run: RunDir, attempt: int) -> int:
    return sum(line["attempt"] == attempt for line in read_json_lines(run.metrics))


def wait_for(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > deadline:
            sys.exit(f"no {what} after {LIMIT_S:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
