"""Time and memory of `hpctrain report` for a large run, and size of the page.

    python benchmarks/report.py [--steps N] [--nodes N] [--limit SECONDS] [--limit-gb GIGABYTES]
                                [--limit-mb MEGABYTES]
    python benchmarks/report.py --steps 1000000 --limit 50 --limit-gb 2

Creates the folder of a run with 100,000 logged steps in six attempts, and a day of telemetry from 64 nodes
with 8 GPUs each. `hpctrain report` reads this folder, alternately with a program that only parses the same
files as JSON. Exits with 1 if the fastest report is slower than the limit, needs more memory, or the page is
larger than its limit.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hpctrain.rundir import RunDir

START, DAY_S, GPUS, EVERY_S, ATTEMPTS = 1_764_000_000.0, 86_400.0, 8, 30.0, 6

PARSE = """
import json, sys
from pathlib import Path
for path in Path(sys.argv[1]).rglob("*.jsonl"):
    for line in path.read_bytes().splitlines():
        json.loads(line)
"""


def make_run(folder: Path, num_steps: int, num_nodes: int) -> RunDir:
    """A day of training with several preemptions."""
    run, draw = RunDir(folder), random.Random(1)
    run.path.mkdir()
    hosts = [f"n{node:03d}" for node in range(num_nodes)]
    events = [{"time": START, "attempt": 0, "kind": "submitted", "job_id": "1", "backend": "slurm"}]
    metrics = []
    now, step_s = START + 60, 0.9 * DAY_S / num_steps
    for attempt in range(ATTEMPTS):
        started = {"nodes": num_nodes, "world_size": num_nodes * GPUS, "hosts": hosts}
        events.append({"time": now, "attempt": attempt, "kind": "started", **started})
        first, last = attempt * num_steps // ATTEMPTS, (attempt + 1) * num_steps // ATTEMPTS
        now += 60
        if attempt:
            events.append({"time": now, "attempt": attempt, "kind": "resumed", "step": first, "seconds": 5.0})
        for step in range(first + 1, last + 1):
            now += step_s
            record = {"step": step, "epoch": 0, "loss": 2 / step**0.3 + draw.random() / 10, "time": now}
            record |= {"attempt": attempt, "lr": 1e-3, "grad_norm": draw.random()}
            metrics.append({**record, "spent": {"all": step_s, "data": step_s / 50}})
        events.append({"time": now, "attempt": attempt, "kind": "signal", "step": last, "saved": True})
        events.append({"time": now, "attempt": attempt, "kind": "requeue", "by": "requeue"})
        now += 600
    events.append({"time": now, "attempt": ATTEMPTS - 1, "kind": "finished", "state": "COMPLETED"})
    write_lines(run.events, events)
    write_lines(run.metrics, metrics)
    run.telemetry(0).parent.mkdir()
    for node, host in enumerate(hosts):
        write_lines(
            run.telemetry(node), [sample(host, at, draw) for at in range(int((now - START) / EVERY_S))]
        )
    return run


def sample(host: str, number: int, draw: random.Random) -> dict[str, object]:
    return {
        "time": START + EVERY_S * number,
        "host": host,
        "seconds": EVERY_S,
        "gpu_util": [round(90 + 10 * draw.random(), 1) for _ in range(GPUS)],
        "gpu_memory": [64_424_509_440] * GPUS,
        "gpu_power_w": [round(500 + 100 * draw.random(), 1) for _ in range(GPUS)],
        "gpu_temp_c": [60] * GPUS,
        "cpu": 12.5,
        "memory": 68_719_476_736,
    }


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def most_memory() -> int:
    """The memory in bytes of the largest process so far, which is the report."""
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--limit-gb", type=float, default=0.6)
    parser.add_argument("--limit-mb", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", options.steps, options.nodes)
        bytes_read = sum(path.stat().st_size for path in run.path.rglob("*.jsonl"))
        report = [sys.executable, "-m", "hpctrain", "report", str(run.path)]
        parse = [sys.executable, "-c", PARSE, str(run.path)]
        pairs = [(seconds(parse), seconds(report)) for _ in range(options.rounds)]
        parsing, ours = (min(times) for times in zip(*pairs, strict=True))
        gigabytes = most_memory() / 1e9
        megabytes = run.report.stat().st_size / 1e6
    print(f"files of the run        {bytes_read / 1e6:7.1f} MB")
    print(f"parsing them as JSON    {parsing:7.2f} s")
    print(f"hpctrain report         {ours:7.2f} s     (limit {options.limit:g})")
    print(f"ratio                   {ours / parsing:7.2f}")
    print(f"its memory              {gigabytes:7.2f} GB    (limit {options.limit_gb:g})")
    print(f"the page                {megabytes:7.2f} MB    (limit {options.limit_mb:g})")
    sys.exit(ours > options.limit or gigabytes > options.limit_gb or megabytes > options.limit_mb)


if __name__ == "__main__":
    main()
