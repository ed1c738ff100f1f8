"""Time of a training step with telemetry and all loggers, relative to a step without these processes.

    python benchmarks/telemetry.py [--steps-ms MS ...] [--pairs N] [--stretch S]

Trains with the process that measures the node and with all installed loggers (trackers offline), which run in
separate processes. These processes are stopped and resumed alternately, and the mean times of a step are
compared. `metrics.jsonl` is always written, so the resumed processes have to deliver the lines of two
stretches. Steps of a millisecond or two write hundreds of lines per second, and have no limit.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from contextlib import redirect_stdout, suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path

import torch
from results import Results
from torch.utils.data import TensorDataset

import hpctrain
from hpctrain.cluster import detect
from hpctrain.cluster.processes import processes
from hpctrain.errors import UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.runtime.sidecar import start_node_sampler
from hpctrain.sandbox.daemons import with_descendants
from hpctrain.telemetry.loggers import find_loggers

LOGGERS = ("csv", "tensorboard", "wandb", "mlflow", "neptune")
OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "offline",
    "NEPTUNE_PROJECT": "a/b",
}
FAIR_MS = 20.0
WIDTH = 512
#: Seconds to exclude after each change.
SETTLING_S = 0.05


class Net(hpctrain.Module):
    """Module whose steps take about `step_s`, because it repeats its passes."""

    def __init__(self, step_s: float, awaited: list[Path]) -> None:
        super().__init__()
        self.step_s, self.awaited, self.passes = step_s, awaited, 0
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        )

    def training_step(self, batch, batch_idx):  # noqa: ARG002
        if not self.passes:
            self.begin(batch[0])
        loss = sum(self.net(batch[0]).square().mean() for _ in range(self.passes)) / self.passes
        return {"loss": loss, "mean": loss.detach() / 2, "lr": 0.1}

    def begin(self, samples: torch.Tensor) -> None:
        # The import and start of tracker clients are excluded.
        while not all(path.exists() for path in self.awaited):
            time.sleep(0.1)
        begun = time.perf_counter()
        for _ in range(20):
            self.net(samples).square().mean().backward()
        self.zero_grad()
        self.passes = max(1, round(20 * self.step_s / (time.perf_counter() - begun)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class InTurn(hpctrain.Callback):
    """Stops and resumes all child processes, for a stretch each."""

    def __init__(self, stretch_s: float, pairs: int) -> None:
        self.stretch_s, self.num_changes = stretch_s, 2 * pairs + 1
        self.changes: list[float] = []

    def on_step_end(self, trainer, module, metrics):  # noqa: ARG002
        if self.changes and time.time() - self.changes[-1] < self.stretch_s:
            return
        if len(self.changes) == self.num_changes:
            signal_all(signal.SIGCONT)
            trainer.end()
            return
        signal_all(signal.SIGSTOP if self.is_on else signal.SIGCONT)
        self.changes.append(time.time())

    @property
    def is_on(self) -> bool:
        return len(self.changes) % 2 == 0

    def ratios(self, records: list[dict]) -> list[tuple[float, float]]:
        """Return the mean step times in seconds, without and with the processes, per pair of stretches."""
        means = [
            statistics.mean(
                record["spent"]["all"]
                for record in records
                if begin + SETTLING_S < record["time"] - record["spent"]["all"] and record["time"] < end
            )
            for begin, end in pairwise(self.changes)
        ]
        return list(zip(means[::2], means[1::2], strict=True))


def signal_all(number: int) -> None:
    """Send a signal to all descendants of this process."""
    own = os.getpid()
    for process in with_descendants(lambda each: each.pid == own, processes()):
        if process.pid != own:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def measure(folder: Path, step_s: float, loggers: list[str], in_turn: InTurn) -> list[tuple[float, float]]:
    run = RunDir(folder)
    run.path.mkdir()
    sampler = start_node_sampler(run, detect({}), {})
    assert sampler is not None
    try:
        with redirect_stdout(StringIO()):
            trainer = hpctrain.Trainer(
                max_steps=10**9,
                global_batch_size=32,
                checkpoint_every=None,
                run_dir=folder,
                loggers=loggers,
                callbacks=[in_turn],
            )
            awaited = [run.logger_state(name) for name in loggers]
            trainer.fit(Net(step_s, awaited), TensorDataset(torch.randn(64, WIDTH)))
    finally:
        signal_all(signal.SIGCONT)
        sampler.stop(1.0)
    return in_turn.ratios(list(read_json_lines(run.metrics)))


def installed() -> list[str]:
    """Return the loggers with installed packages."""
    found = []
    for name in LOGGERS:
        try:
            find_loggers([name])
        except UserError:
            continue
        found.append(name)
    return found


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--steps-ms", type=float, nargs="+", default=[1.0, 10.0, 30.0])
    results.parser.add_argument("--pairs", type=int, default=6)
    results.parser.add_argument("--stretch", type=float, default=2.0)
    options = results.parse()
    os.environ.update(OFFLINE)
    # The other core is for sampler and loggers, as on a node with more cores than ranks.
    torch.set_num_threads(1)
    loggers = installed()
    with tempfile.TemporaryDirectory() as folder:
        for number, step_ms in enumerate(options.steps_ms):
            in_turn = InTurn(options.stretch, options.pairs)
            pairs = measure(Path(folder, f"run-{number}"), step_ms / 1000, loggers, in_turn)
            limit = 1.01 if step_ms >= FAIR_MS else None
            name = f"steps of {statistics.median(without for without, _ in pairs) * 1e3:.2g} ms"
            results.add(name, [with_all / without for without, with_all in pairs], limit=limit)
    results.finish()


if __name__ == "__main__":
    main()
