"""Time of `hpctrain list` for 1,000 runs with pending jobs, compared with squeue alone.

    python benchmarks/status.py [--rounds N]

Starts a sandbox (requires Linux, root and Slurm's packages) with 1,000 pending jobs. Each has a run folder
with the events, metrics and checkpoints of a longer run. Both commands run alternately. The times are those
of the fastest rounds, because noise can only increase times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Results

from hpctrain import sandbox
from hpctrain.rundir import RunDir

NUM_RUNS = 1000
STEPS, CHECKPOINT_EVERY, KEPT_CHECKPOINTS, ATTEMPTS = 500, 20, 3, 3


def make_runs(folder: Path, environ: dict[str, str]) -> None:
    """Create the folders of pending runs that were preempted twice, and submit their jobs."""
    for index in range(NUM_RUNS):
        run = RunDir(folder / f"run-{index}")
        run.path.mkdir(parents=True)
        submit = ["sbatch", "--parsable", "--hold", f"--chdir={run.path}", "--wrap=true"]
        make_run(run, subprocess.check_output(submit, env=environ, text=True).strip())


def make_run(run: RunDir, job_id: str) -> None:
    run.spec.touch()
    events = [{"kind": "submitted", "job_id": job_id, "backend": "slurm"}]
    for attempt in range(ATTEMPTS):
        run.attempt_logs(attempt).mkdir(parents=True)
        events += [{"kind": "started", "nodes": 4, "world_size": 32, "hosts": []}, {"kind": "requeue"}]
    events += [
        {
            "kind": "checkpoint",
            "step": step,
            "path": str(run.checkpoint(step)),
            "bytes": 10**9,
            "seconds": 1.5,
        }
        for step in range(CHECKPOINT_EVERY, STEPS, CHECKPOINT_EVERY)
    ]
    write_lines(run.events, [{"time": time.time(), "attempt": 0, **event} for event in events])
    write_lines(
        run.metrics,
        [
            {"step": step, "epoch": 0, "loss": 1 / step, "time": time.time(), "attempt": 0}
            for step in range(1, STEPS)
        ],
    )
    for step in range(STEPS - KEPT_CHECKPOINTS, STEPS):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "manifest.json").touch()


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def seconds(command: list[str], folder: Path, environ: dict[str, str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    if (lines := done.stdout.count("PENDING")) < NUM_RUNS:
        sys.exit(f"{' '.join(command)} lists {lines} pending jobs, but {NUM_RUNS} were submitted")
    return time.perf_counter() - start


def measure(box: sandbox.Sandbox, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of the fastest squeue and list, and the number of squeue calls per list."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wrapper = folder / "bin" / "squeue"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\necho >>{folder}/calls\nexec {shutil.which("squeue")} "$@"\n')
        wrapper.chmod(0o755)
        environ = {**os.environ, **box.env, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
        make_runs(folder / "runs", environ)
        squeue = [str(shutil.which("squeue")), "--noheader", "--format=%i %T %r %Z"]
        listing = [sys.executable, "-m", "hpctrain", "list"]
        pairs = [(seconds(squeue, folder, environ), seconds(listing, folder, environ)) for _ in range(rounds)]
        bare, ours = (min(times) for times in zip(*pairs, strict=True))
        return bare, ours, len((folder / "calls").read_text().splitlines()) / rounds


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=7)
    options = results.parse()
    box = sandbox.up(f"bench-{os.getpid()}", nodes=1, gpus_per_node=0)
    try:
        bare, ours, calls = measure(box, options.rounds)
    finally:
        box.down()
    results.add(f"squeue, {NUM_RUNS:,} jobs", bare * 1000, "ms")
    results.add(f"hpctrain list, {NUM_RUNS:,} runs", ours * 1000, "ms", limit=1000.0)
    results.add("calls of squeue per list", calls, "", limit=1.0)
    results.finish()


if __name__ == "__main__":
    main()
