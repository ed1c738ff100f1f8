"""What it costs a training step that the run is measured and logged: everything on, against nothing of it.

    python benchmarks/telemetry.py [--rounds N] [--steps N] [--limit RATIO]

Trains the same model in turn, without and with the process that measures the node and all loggers whose
packages are installed (trackers offline), and compares the time of a step. Both write `metrics.jsonl`.
Exits with 1 where the ratio of the medians is above the limit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import hpctrain
from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.runtime.node_sampler import NodeSampler
from hpctrain.telemetry.loggers import find_loggers

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "neptune")
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "offline",
    "NEPTUNE_PROJECT": "a/b",
}
#: Steps at the beginning of a training that are not counted.
WARM_UP = 10


class Net(hpctrain.Module):
    def __init__(self, width: int, awaited: list[Path]) -> None:
        super().__init__()
        self.awaited = awaited
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
        )

    def training_step(self, batch, batch_idx):  # noqa: ARG002
        # That clients of trackers are imported and have started is not counted.
        while not all(path.exists() for path in self.awaited):
            time.sleep(0.1)
        loss = self.net(batch[0]).square().mean()
        return {"loss": loss, "mean": loss.detach() / 2, "lr": 0.1}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def step_s(folder: Path, steps: int, width: int, loggers: list[str], *, measured: bool) -> float:
    """The median time of a step, in seconds."""
    run = RunDir(folder)
    run.path.mkdir()
    switched = {} if measured else {"HPCTRAIN_TELEMETRY": "0"}
    sampler = NodeSampler(run, detect({}), switched)
    data = TensorDataset(torch.randn(64, width))
    with redirect_stdout(StringIO()):
        trainer = hpctrain.Trainer(
            max_steps=steps, global_batch_size=32, checkpoint_every=None, run_dir=folder, loggers=loggers
        )
        awaited = [run.logger_memory(name) for name in loggers]
        trainer.fit(Net(width, awaited), data)
    sampler.end()
    times = [record["spent"]["all"] for record in read_json_lines(run.metrics)]
    return statistics.median(times[WARM_UP:])


def installed() -> list[str]:
    """Loggers whose packages are there."""
    found = []
    for name in LOGGERS:
        try:
            find_loggers([name])
        except UserError:
            continue
        found.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--limit", type=float, default=1.01)
    options = parser.parse_args()
    os.environ.update(OFFLINE)
    # The other core is for what measures and logs, as on a node with more cores than ranks.
    torch.set_num_threads(1)
    loggers = installed()
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            shape = (options.steps, options.width)
            off = step_s(Path(folder, f"off-{number}"), *shape, [], measured=False)
            on = step_s(Path(folder, f"on-{number}"), *shape, loggers, measured=True)
            pairs.append((off, on))
    off, on = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(on / off for off, on in pairs)
    print(f"loggers           {', '.join(loggers)}")
    print(f"a step without    {1000 * off:8.3f} ms")
    print(f"a step with all   {1000 * on:8.3f} ms")
    print(f"ratio             {ratio:8.4f}    (limit {options.limit:g})")
    sys.exit(ratio > options.limit)


if __name__ == "__main__":
    main()
