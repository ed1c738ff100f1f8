"""Cost of copies of the state in memory in each step, and the steps repeated after `kill -9` of a rank.

    python benchmarks/memory_copies.py [--rounds N] [--kills N] [--ranks N]

For the cost, two ranks train a small model alternately with and without copies, in the same processes. With
two nodes, each rank simulates a node, and the ranks also exchange their copies. The CPU time includes all
threads of a rank, and depends less on other work on the machine than the time of a step.

For the repeated steps, the last rank of a run without other checkpoints is killed repeatedly, after some
steps and when standby workers are ready.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import restart
import torch
from restart import Hpctrain, count, last_pid, wait_for
from results import Results
from step_overhead import WARM_UP, Clock

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import hpctrain

folder = Path(sys.argv[1])
rank = int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))

class Net(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        optimizer.register_step_post_hook(self.write_step)
        return optimizer

    def write_step(self, *_):
        self.step += 1
        if rank == 0:
            with open(folder / "steps.jsonl", "a") as lines:
                print(json.dumps({"step": self.step, "time": time.time(), "pid": os.getpid()}), file=lines)

class Steps(hpctrain.Callback):
    def on_fit_start(self, trainer, module):
        module.step = trainer.step

data = torch.utils.data.TensorDataset(torch.randn(4096, 64))
settings = {"max_steps": 1_000_000, "global_batch_size": 32, "checkpoint_every": None}
hpctrain.Trainer(callbacks=[Steps()], **settings).fit(Net(), data)
"""
WIDTH, BATCH, LAYERS = 512, 640, 4
#: Steps of a round, and the limit of the ratio. Not all steps copy, so the cost is an average over many.
COSTS = {"ddp, one node": (100, 1.03), "zero1, two nodes": (200, 1.03)}


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=10)
    results.parser.add_argument("--kills", type=int, default=20)
    results.parser.add_argument("--ranks", type=int, default=4)
    results.parser.add_argument("--as-rank", choices=COSTS, help="internal: train as one of two ranks")
    options = results.parse()
    if options.as_rank:
        print(json.dumps(train_alternately(options.as_rank, options.rounds)))
        return
    for strategy in COSTS:
        add_costs(results, strategy, options.rounds)
    add_kills(results, options.ranks, options.kills)
    results.finish()


def add_costs(results: Results, strategy: str, rounds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environ |= {"HPCTRAIN_ATTEMPT": "0"}  # without it, there are no copies
        num_nodes = 2 if "two nodes" in strategy else 1
        environ |= {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": str(2 // num_nodes),
            "GROUP_WORLD_SIZE": str(num_nodes),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-rank", strategy, f"--rounds={rounds}"],
                env={
                    **environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank if num_nodes == 1 else 0),
                    "GROUP_RANK": str(0 if num_nodes == 1 else rank),
                    "HPCTRAIN_RUN_DIR": folder,
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    measured = json.loads(outputs[0].splitlines()[-1])
    for i, name in enumerate(("step", "CPU time of a step")):
        plain, copying = ([each[i] for each in measured[kind]] for kind in ("plain", "copying"))
        results.add(f"{strategy}: {name}, without copies", [1e3 * each for each in plain], "ms")
        ratios = [with_ / without for with_, without in zip(copying, plain, strict=True)]
        limit = COSTS[strategy][1] if i == 0 else None
        results.add(f"{strategy}: {name}, with ÷ without", ratios, limit=limit, headline=i == 0)
    results.add(f"{strategy}: steps between copies", measured["every"], "")


def train_alternately(strategy: str, rounds: int) -> dict[str, Any]:
    """Return the time and the CPU time of a step in each round, and data on copies, as one of two ranks."""
    import hpctrain
    from hpctrain.checkpoint.interval import CopyInterval
    from hpctrain.training.saving import state_copies

    class Net(hpctrain.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.cpu_times = Clock(), list[float]()
            self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch, _batch_idx):
            self.clock.tick()
            self.cpu_times.append(time.process_time())
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH))
    measured: dict[str, list[Any]] = {"plain": [], "copying": [], "every": []}
    intervals: list[Any] = []
    create = CopyInterval.__init__

    def record(interval: Any, fixed: int | None) -> None:
        create(interval, fixed)
        intervals.append(interval)

    CopyInterval.__init__ = record  # type: ignore[method-assign]
    folder, steps = Path(os.environ.pop("HPCTRAIN_RUN_DIR")), COSTS[strategy][0]
    memory = state_copies._SHARED_MEMORY = folder / f"memory-{os.environ['GROUP_RANK']}"
    memory.mkdir(exist_ok=True)
    for number in range(-1, rounds):
        for name in ("plain", "copying"):
            module = Net()
            run = RunDir(folder / f"{name}-{number}")
            trainer = hpctrain.Trainer(
                max_steps=steps,
                global_batch_size=2 * BATCH,
                checkpoint_every=None,
                strategy=strategy.split(",")[0],
                run_dir=run.path,
                memory_copies=name == "copying",
            )
            trainer.fit(module, data)
            if number >= 0:  # the first round allocates memory
                spent = module.cpu_times[-1] - module.cpu_times[WARM_UP]
                step_s = statistics.fmean(module.clock.steps())
                measured[name].append((step_s, spent / (steps - WARM_UP - 1)))
                if name == "copying":
                    measured["every"].append(intervals[-1].every)
    return measured


def add_kills(results: Results, num_ranks: int, kills: int) -> None:
    repeated: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, script = Path(scratch), Path(scratch, "train.py")
        script.write_text(SCRIPT)
        side = Hpctrain(script, folder, num_ranks, warm=True)
        try:
            repeated += [kill_rank(side, folder, num_ranks - 1, attempt) for attempt in range(kills)]
        finally:
            side.stop()
    results.add("completed steps repeated after a kill", repeated, "", limit=1, headline=True)


def kill_rank(side: Hpctrain, folder: Path, victim: int, attempt: int) -> float:
    """Kill a rank of an attempt; return the number of repeated steps."""
    steps = folder / "steps.jsonl"
    known = count(steps)
    if not wait_for(lambda: count(steps) > known + 15 and side.is_ready(attempt + 1)):
        raise TimeoutError(f"no steps, or no standby workers, after {restart.LIMIT_S:.0f} s")
    pid = last_pid(steps)
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
    if not wait_for(lambda: last_pid(steps) != pid, restart.RESTART_LIMIT_S):
        raise TimeoutError(f"no step within {restart.RESTART_LIMIT_S:.0f} s of a kill")
    records = list(read_json_lines(steps))
    last = max(i for i, record in enumerate(records) if record["pid"] == pid)
    return records[last]["step"] - records[last + 1]["step"] + 1


if __name__ == "__main__":
    main()
