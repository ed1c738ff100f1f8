"""Cost of emergency checkpoints in each step, and the time from `kill -9` of a rank to the next step.

    python benchmarks/emergency_checkpoints.py [--rounds N] [--kills N] [--ranks N]

For the cost of a step, two ranks train a small model alternately with and without emergency checkpoints, in
the same processes. Each rank simulates a node, so the ranks also exchange their records, or with `zero1` the
copies of their states. The CPU time includes all threads of a rank, and depends less on other work on the
machine than the time of a step. The memory for copies is that of the files on the node of rank 0, and of two
copies of the state in its process.

For the time after a kill, the last rank of a run is killed repeatedly. Before each kill, the benchmark waits
for some steps and, with hpctrain, for standby workers. torchrun restarts the script of `restart.py`, which
saves every tenth step.
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
from restart import Hpctrain, Torchrun, count, last_pid, wait_for
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
        time.sleep(0.02)
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
hpctrain.Trainer(emergency_checkpoints=True, callbacks=[Steps()], **settings).fit(Net(), data)
"""
WIDTH, BATCH, LAYERS = 512, 640, 4
#: Steps of a round, and the limit of the ratio. Copies are rare, so their cost is an average over many steps.
COSTS = {"ddp": (40, 1.01), "zero1": (100, 1.02)}


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
    add_recoveries(results, options.ranks, options.kills)
    results.finish()


def add_costs(results: Results, strategy: str, rounds: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--as-rank", strategy, f"--rounds={rounds}"],
                env={**environ, "RANK": str(rank), "GROUP_RANK": str(rank), "HPCTRAIN_RUN_DIR": folder},
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
        plain, armed = ([each[i] for each in measured[kind]] for kind in ("plain", "armed"))
        results.add(
            f"{strategy}: {name}, without emergency checkpoints", [1e3 * each for each in plain], "ms"
        )
        ratios = [with_ / without for with_, without in zip(armed, plain, strict=True)]
        limit = COSTS[strategy][1] if i == 0 else None
        results.add(f"{strategy}: {name}, with ÷ without", ratios, limit=limit, headline=i == 0)
    if measured["memory"]:
        results.add(f"{strategy}: seconds between copies", measured["every_s"], "s")
        results.add(f"{strategy}: memory for copies, measured ÷ announced", measured["memory"], limit=1.01)


def train_alternately(strategy: str, rounds: int) -> dict[str, Any]:
    """Return the time and the CPU time of a step in each round, and data on copies, as one of two ranks."""
    import hpctrain
    from hpctrain.runtime.program.emergency_save import emergency_save
    from hpctrain.training.saving import emergency_checkpoints

    class Net(hpctrain.Module):
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.cpu_times = Clock(), list[float]()
            self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch, _batch_idx):
            self.clock.tick()
            self.cpu_times.append(time.process_time())
            if is_warm_up:
                sizes.append(sum(path.stat().st_size for path in memory.rglob("*") if path.is_file()))
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    emergency_save.is_available = True
    data = torch.utils.data.TensorDataset(torch.randn(4096, WIDTH))
    measured: dict[str, list[Any]] = {"plain": [], "armed": [], "every_s": [], "memory": []}
    folder, steps = Path(os.environ.pop("HPCTRAIN_RUN_DIR")), COSTS[strategy][0]
    memory = emergency_checkpoints._SHARED_MEMORY = folder / f"memory-{os.environ['RANK']}"
    memory.mkdir()
    for number in range(-1, rounds):
        for name in ("plain", "armed"):
            is_warm_up, sizes, module = number < 0, [0], Net()
            run = RunDir(folder / f"{name}-{number}")
            trainer = hpctrain.Trainer(
                max_steps=steps,
                global_batch_size=2 * BATCH,
                checkpoint_every=None,
                strategy=strategy,
                run_dir=run.path,
                emergency_checkpoints=name == "armed",
            )
            trainer.fit(module, data)
            copied = next((e for e in run.read_events() if "memory_bytes" in e), None)
            if is_warm_up and copied is not None:
                in_process = 2 * copied["sent_bytes"]
                measured["memory"].append((max(sizes) + in_process) / copied["memory_bytes"])
            elif not is_warm_up:
                mean = statistics.median if strategy == "ddp" else statistics.fmean
                spent = module.cpu_times[-1] - module.cpu_times[WARM_UP]
                time_s, cpu_s = mean(module.clock.steps()), spent / (steps - WARM_UP - 1)
                measured[name].append((time_s, cpu_s))
                measured["every_s"] += [] if copied is None else [copied["every_s"]]
    return measured


def add_recoveries(results: Results, num_ranks: int, kills: int) -> None:
    medians = {}
    for name in ("hpctrain", "torchrun"):
        parts, failures = kill_repeatedly(name, num_ranks, kills)
        results.add(f"{name}: kills without a restart", failures, "", limit=0 if name == "hpctrain" else None)
        for part in parts[0] if parts else ():
            values = [each[part] for each in parts]
            unit, is_main = "" if "steps" in part else "s", part == "next step"
            figure = results.add(f"{name}: {part}", values, unit, headline=is_main)
            if is_main:
                medians[name] = figure
    if len(medians) == 2:
        results.add("hpctrain ÷ torchrun", medians["hpctrain"] / medians["torchrun"], limit=0.5)


def kill_repeatedly(name: str, num_ranks: int, kills: int) -> tuple[list[dict[str, float]], int]:
    """Return the result of each kill, and 1 if the last kill was followed by no restart, otherwise 0."""
    parts: list[dict[str, float]] = []
    failures = 0
    while len(parts) < kills and not failures:
        with tempfile.TemporaryDirectory() as scratch:
            folder, script = Path(scratch), Path(scratch, "train.py")
            side: Torchrun | Hpctrain
            if name == "torchrun":
                script.write_text(restart.SCRIPT)
                side = Torchrun(script, folder, num_ranks, max_restarts=kills)
            else:
                script.write_text(SCRIPT)
                side = Hpctrain(script, folder, num_ranks, warm=True)
            try:
                for attempt in range(kills - len(parts)):
                    parts += [kill_rank(side, folder, num_ranks - 1, attempt)]
            except TimeoutError as error:
                print(f"{name}: {error}", file=sys.stderr)
                failures = 1
            finally:
                side.stop()
    return parts, failures


def kill_rank(side: Torchrun | Hpctrain, folder: Path, victim: int, attempt: int) -> dict[str, float]:
    """Kill a rank of an attempt; return the seconds of each part of the recovery, and the repeated steps."""
    steps = folder / "steps.jsonl"
    known = count(steps)
    if not wait_for(lambda: count(steps) > known + 15 and side.is_ready(attempt + 1)):
        raise TimeoutError(f"no steps, or no standby workers, after {restart.LIMIT_S:.0f} s")
    pid = last_pid(steps)
    killed = time.time()
    os.kill(int((folder / f"pid-{victim}").read_text()), signal.SIGKILL)
    if not wait_for(lambda: last_pid(steps) != pid, restart.RESTART_LIMIT_S):
        raise TimeoutError(f"no step within {restart.RESTART_LIMIT_S:.0f} s of a kill")
    records = list(read_json_lines(steps))
    last = max(i for i, record in enumerate(records) if record["pid"] == pid)
    repeated = records[last]["step"] - records[last + 1]["step"] + 1
    parts = {"next step": records[last + 1]["time"] - killed, "repeated steps": repeated}
    if isinstance(side, Hpctrain):
        parts |= split(side.run, attempt, killed, records[last + 1]["time"])
    return parts


def split(run: RunDir, attempt: int, killed: float, next_step: float) -> dict[str, float]:
    """Return the seconds of each part of a recovery."""
    events = {(event["kind"], event["attempt"]): event for event in run.read_events()}
    saved, resumed = events["emergency_checkpoint", attempt], events["resumed", attempt + 1]
    started = events["started", attempt + 1]["time"]
    return {
        "detection, and end of the ranks": saved["time"] - killed - saved["freeze_s"] - saved["save_s"],
        "states of the ranks": saved["freeze_s"],
        "save": saved["save_s"],
        "decision": started - saved["time"],
        "start, and rendezvous": resumed["time"] - resumed["seconds"] - started,
        "load": resumed["seconds"],
        "first step": next_step - resumed["time"],
    }


if __name__ == "__main__":
    main()
