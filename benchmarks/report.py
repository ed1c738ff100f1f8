"""Time and memory of `hpctrain report` for a large run, and size of the page.

    python benchmarks/report.py [--steps N] [--nodes N] [--rounds N]

The run has 100,000 logged steps in six attempts, and a day of telemetry from 64 nodes with 8 GPUs each. For
comparison, another process only parses the same files as JSON. Both run alternately. The times are those of
the fastest rounds, because noise can only increase times. The time to read and validate the steps is compared
with that of `json.loads`.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import Results

from hpctrain.record_types import StepRecord, read_records
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
    """Create the folder of a run: a day of training with several preemptions."""
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


def read_steps(path: Path) -> tuple[float, float]:
    """Return the microseconds per line of the steps, with hpctrain and with `json.loads`."""
    num_lines = len(path.read_bytes().splitlines())
    start = time.perf_counter()
    for _ in read_records(path, StepRecord):
        pass
    middle = time.perf_counter()
    with path.open("rb") as file:
        for line in file:
            json.loads(line)
    return 1e6 * (middle - start) / num_lines, 1e6 * (time.perf_counter() - middle) / num_lines


def most_memory() -> int:
    """Return the peak memory in bytes of the largest process so far, which is that of the report."""
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--steps", type=int, default=100_000)
    results.parser.add_argument("--nodes", type=int, default=64)
    results.parser.add_argument("--rounds", type=int, default=3)
    options = results.parse()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", options.steps, options.nodes)
        bytes_read = sum(path.stat().st_size for path in run.path.rglob("*.jsonl"))
        report = [sys.executable, "-m", "hpctrain", "report", str(run.path)]
        parse = [sys.executable, "-c", PARSE, str(run.path)]
        pairs = [(seconds(parse), seconds(report)) for _ in range(options.rounds)]
        parsing, ours = (min(times) for times in zip(*pairs, strict=True))
        reading = [read_steps(run.metrics) for _ in range(options.rounds)]
        ours_us, json_us = (min(times) for times in zip(*reading, strict=True))
        results.add("files of the run", bytes_read / 1e6, "MB")
        results.add("a step: json.loads", json_us, "µs")
        results.add("a step: read and validated", ours_us, "µs", limit=json_us)
        results.add("parsing the files as JSON", parsing, "s")
        results.add("hpctrain report", ours, "s", limit=5.0 * max(1.0, options.steps / 100_000))
        results.add(
            "memory of hpctrain report", most_memory() / 1e9, "GB", limit=0.6 + options.steps / 700_000
        )
        results.add("page", run.report.stat().st_size / 1e6, "MB", limit=5.0)
    results.finish()


if __name__ == "__main__":
    main()
