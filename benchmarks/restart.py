"""Time from `kill -9` of a rank to the next trained step: hpctrain and torchrun, with the same script.

    python benchmarks/restart.py [--ranks N] [--rounds N] [--phases]

Three variants alternate: `torchrun --standalone --max-restarts`, hpctrain without standby workers, and
hpctrain with standby workers. In each round, each variant is started, trains, loses its last rank to SIGKILL,
and resumes from the script's own checkpoint. Rounds in which torchrun's ranks do not find each other within
half a minute are excluded and counted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from math import inf, isfinite
from pathlib import Path

from results import Results

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = """
import json, os, sys, time
begun = time.time()
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
imported = time.time()

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
met = time.time()
rank = dist.get_rank()
torch.manual_seed(0)
module = torch.nn.Linear(64, 64)
model = DistributedDataParallel(module)
optimizer = torch.optim.AdamW(model.parameters())
saved, first = folder / "state.pt", 0
if saved.exists():
    state = torch.load(saved)
    first = state["step"]
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
for step in range(first + 1, 1_000_000):
    loss = model(torch.full((8, 64), float(rank))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        if step % 10 == 0:
            state = {"step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "new.pt")
            os.replace(folder / "new.pt", saved)
        times = {"begun": begun, "imported": imported, "met": met} if step == first + 1 else {}
        with open(folder / "steps.jsonl", "a") as lines:
            print(json.dumps({"step": step, "time": time.time(), "pid": os.getpid(), **times}), file=lines)
    time.sleep(0.02)
"""
#: Time limit of a start, even on a busy machine.
LIMIT_S = 60.0
#: Time limit of a restart.
RESTART_LIMIT_S = 30.0


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--ranks", type=int, default=2)
    results.parser.add_argument("--rounds", type=int, default=5)
    results.parser.add_argument("--phases", action="store_true", help="show a time breakdown")
    options = results.parse()
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    phases: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(options.rounds):
            for name in SIDES:
                parts = restart_once(name, SCRIPT, Path(scratch), options.ranks)
                seconds[name].append(parts["first step"])
                phases[name].append(parts)
    medians = {}
    for name, values in seconds.items():
        restarted = [value for value in values if isfinite(value)] or [inf]
        medians[name] = results.add(name, restarted, "s", headline=True)
        results.add(
            f"{name}: rounds without a restart",
            len(values) - len(restarted),
            "",
            limit=None if name == "torchrun" else 0,
        )
        if options.phases:
            for part in max(phases[name], key=len):
                results.add(f"{name}: {part}", [run[part] for run in phases[name] if part in run], "s")
    for name, limit in (("hpctrain", 1.0), ("hpctrain, standby workers", 0.5)):
        results.add(f"{name} ÷ torchrun", medians[name] / medians["torchrun"], limit=limit)
    results.finish()


class Side:
    """A variant of starting the script."""

    def is_ready(self, _attempt: int) -> bool:
        """Return true if a rank may be killed now. The attempt with the given number follows."""
        return True

    def moments(self) -> dict[str, float]:
        """Return the times of events, in seconds since the epoch."""
        return {}

    def stop(self) -> None:
        """End the variant and all its processes."""


class Torchrun(Side):
    def __init__(self, script: Path, folder: Path, ranks: int, *, max_restarts: int = 3) -> None:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self._process = subprocess.Popen(
            [sys.executable, *command, f"--max-restarts={max_restarts}", str(script), str(folder)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)  # which it passes on to the ranks
        self._process.wait(LIMIT_S)


class Hpctrain(Side):
    def __init__(self, script: Path, folder: Path, ranks: int, *, warm: bool, gpus: bool = False) -> None:
        self.run, self._warm = RunDir(folder / "run"), warm
        shape = f"--gpus-per-node={ranks}" if gpus else f"--ntasks-per-node={ranks}"
        self._hpctrain(
            *("submit", "--backend", "local", shape, "--cpus-per-task=1"),
            *(f"--standby-workers={'5' if warm else 'never'}", "--run-dir", str(self.run.path)),
            *("--no-code-snapshot", str(script), str(folder)),
        )

    def is_ready(self, attempt: int) -> bool:
        return not self._warm or f"ready for attempt {attempt}\n" in self.run.supervisor_log.read_text()

    def moments(self) -> dict[str, float]:
        events = {
            (event["kind"], event["attempt"]): event["time"] for event in read_json_lines(self.run.events)
        }
        return {
            "all ranks gone": events["failure", 0],
            "restart decided": events["restart", 0],
            "ranks started": events["started", 1],
        }

    def stop(self) -> None:
        self._hpctrain("cancel", str(self.run.path))
        # For a cancelled run, the exit code reports a failure.
        self._hpctrain("wait", str(self.run.path), succeeds=False)

    def _hpctrain(self, *words: str, succeeds: bool = True) -> None:
        command = [sys.executable, "-m", "hpctrain", *words]
        done = subprocess.run(command, cwd=self.run.path.parent, capture_output=True, text=True, check=False)
        if succeeds and done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


SIDES: dict[str, Callable[..., Side]] = {
    "torchrun": lambda script, folder, ranks, **_: Torchrun(script, folder, ranks),
    "hpctrain": partial(Hpctrain, warm=False),
    "hpctrain, standby workers": partial(Hpctrain, warm=True),
}


def restart_once(name: str, text: str, scratch: Path, ranks: int, *, gpus: bool = False) -> dict[str, float]:
    """Start a variant of the script, kill its last rank, and return the seconds to each event."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    script = folder / "train.py"
    script.write_text(text)
    side = SIDES[name](script, folder, ranks, gpus=gpus)
    try:
        return measure(side, folder, ranks - 1)
    finally:
        side.stop()


def measure(side: Side, folder: Path, victim: int) -> dict[str, float]:
    """Kill a training rank; return the seconds to each event, with the first step of rank 0 as the last."""
    steps = folder / "steps.jsonl"
    if not wait_for(lambda: count(steps) > 25 and side.is_ready(1)):
        sys.exit(f"no steps, or no standby workers, after {LIMIT_S:.0f} s")
    pid = json.loads(steps.read_text().splitlines()[0])["pid"]
    killed = time.time()
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
    if not wait_for(lambda: last_pid(steps) != pid, RESTART_LIMIT_S):
        return {"first step": inf}
    first = next(record for record in read_json_lines(steps) if record["pid"] != pid)
    names = {"begun": "script begins", "imported": "torch imported", "met": "ranks met", "time": "first step"}
    parts = {text: first[name] - killed for name, text in names.items()}
    return {name: at - killed for name, at in side.moments().items()} | parts


def count(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def last_pid(path: Path) -> int:
    return [record["pid"] for record in read_json_lines(path)][-1]


def wait_for(done: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    """Return true if the condition became true within the limit."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    main()
