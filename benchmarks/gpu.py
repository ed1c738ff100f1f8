"""Costs of the Trainer, of copies and checkpoints, and the time of a restart, on one GPU.

    python benchmarks/gpu.py [--rounds N] [--only steps|copies|saves|restarts ...]

The model of `examples/gpt.py` trains with bfloat16 (`bf16-mixed`), in a hand-written loop, in the Trainer and
in Lightning. The variants alternate in the same process. The time of a step is the mean of a round, and the
GPU is synchronized only at its end. Copies in memory are compared over a
longer time. The pause for a checkpoint is the duration of the call, after which the next step can begin. The
total time ends when the checkpoint is on disk. The restarts are those of `restart.py`, with the model on the
GPU.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import restart
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from elastic_determinism import load_example
from results import Results
from torch import Tensor
from torch.utils.data import DataLoader

import hpctrain
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave
from hpctrain.rundir import ATTEMPT_VARIABLE, RunDir

#: Width, depth, heads, bytes of context, and windows per step, by number of parameters.
SIZES = {"5 million parameters": (256, 6, 4, 128, 32), "86 million parameters": (768, 12, 12, 512, 32)}
WARM_UP, STEPS = 10, 40
#: Duration of a training with copies in memory.
COPIES_S = 20.0
STATE_MB = 1024
PARTS = ("steps", "copies", "saves", "restarts")
ON_GPU = {
    'dist.init_process_group("gloo")': 'dist.init_process_group("nccl", device_id=0)',
    "module = torch.nn.Linear(64, 64)": "module = torch.nn.Linear(64, 64).cuda()",
    "torch.full((8, 64), float(rank))": 'torch.full((8, 64), float(rank), device="cuda")',
}

Way = Callable[[ModuleType, str, bytes, int], float]


class Steps:
    """Measures the mean time of the steps after a warm-up."""

    def __init__(self) -> None:
        self.count, self.begun = 0, 0.0

    def tick(self, *_: object) -> None:
        self.count += 1
        if self.count == WARM_UP:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()

    def mean(self) -> float:
        torch.cuda.synchronize()
        return (time.perf_counter() - self.begun) / (self.count - WARM_UP)


def create(
    gpt: ModuleType, size: str, text: bytes, steps: int
) -> tuple[torch.nn.Module, torch.utils.data.Dataset]:
    width, depth, heads, context, _ = SIZES[size]
    torch.manual_seed(1)
    return gpt.GPT(context, width, depth, heads, steps, 1e-3), gpt.Windows(text, context)


def count_steps(optimizer: torch.optim.Optimizer, steps: Steps) -> None:
    optimizer.register_step_post_hook(steps.tick)


def by_hand(gpt: ModuleType, size: str, text: bytes, num_steps: int) -> float:
    model, data = create(gpt, size, text, num_steps)
    model, steps = model.cuda(), Steps()
    optimizer, schedule = model.configure_optimizers()
    count_steps(optimizer, steps)
    loader = DataLoader(data, batch_size=SIZES[size][-1], shuffle=True, pin_memory=True, drop_last=True)
    batches: Iterator[Tensor] = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(batches, num_steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model.loss(batch.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        schedule.step()
    return steps.mean()


def in_trainer(gpt: ModuleType, size: str, text: bytes, num_steps: int, **settings: object) -> float:
    model, data = create(gpt, size, text, num_steps)
    steps, create_optimizers = Steps(), model.configure_optimizers

    def configure_optimizers():
        optimizer, schedule = create_optimizers()
        count_steps(optimizer, steps)
        return optimizer, schedule

    model.configure_optimizers = configure_optimizers
    settings = {"checkpoint_every": None, "precision": "bf16-mixed", "seed": 1} | settings
    hpctrain.Trainer(max_steps=num_steps, global_batch_size=SIZES[size][-1], **settings).fit(model, data)
    return steps.mean()


def in_trainer_elastic(gpt: ModuleType, size: str, text: bytes, num_steps: int) -> float:
    grain = {"grain_size": SIZES[size][-1]}
    return in_trainer(gpt, size, text, num_steps, elastic_determinism=True, strategy="ddp", **grain)


def in_lightning(gpt: ModuleType, size: str, text: bytes, num_steps: int) -> float:
    import lightning

    model, data = create(gpt, size, text, num_steps)
    steps = Steps()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, _batch_idx):
            return self.model.loss(batch)

        def configure_optimizers(self):
            optimizer, schedule = self.model.configure_optimizers()
            count_steps(optimizer, steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=num_steps, logger=False, **quiet
    )
    loader = DataLoader(data, batch_size=SIZES[size][-1], shuffle=True, pin_memory=True, drop_last=True)
    trainer.fit(Model(), loader)
    return steps.mean()


WAYS: dict[str, Way] = {
    "hand-written loop": by_hand,
    "Trainer": in_trainer,
    "Trainer, elastic determinism": in_trainer_elastic,
    "Lightning": in_lightning,
}


def add_steps(results: Results, gpt: ModuleType, text: bytes, rounds: int) -> None:
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for number in range(rounds + 1):
            for name, way in WAYS.items():
                time_s = way(gpt, size, text, WARM_UP + STEPS)
                times[name] += [time_s] if number else []  # without the first round
        plain = times.pop("hand-written loop")
        results.add(f"{size}: step of the hand-written loop", [1e3 * each for each in plain], "ms")
        for name, own in times.items():
            ratios = [each / other for each, other in zip(own, plain, strict=True)]
            results.add(f"{size}: {name} ÷ hand-written loop", ratios, headline=name != "Lightning")


def add_copies(results: Results, gpt: ModuleType, text: bytes, folder: Path) -> None:
    """Compare training with and without copies of the state in memory."""
    size = next(iter(SIZES))
    num_steps = WARM_UP + int(COPIES_S / in_trainer(gpt, size, text, WARM_UP + STEPS))
    os.environ[ATTEMPT_VARIABLE] = "0"  # as in a run
    times = {}
    for wanted in (False, True):
        run = RunDir(folder / f"copies-{wanted}")
        settings = {"memory_copies": wanted, "run_dir": run.path}
        times[wanted] = in_trainer(gpt, size, text, num_steps, **settings)
    results.add(
        f"{size}: step with copies in memory ÷ without", times[True] / times[False], limit=1.02, headline=True
    )
    del os.environ[ATTEMPT_VARIABLE]


def add_saves(results: Results, folder: Path, rounds: int) -> None:
    state = {f"layer-{i}": torch.randn(2**20, device="cuda") for i in range(STATE_MB // 4)}
    store = CheckpointStore(folder / "ours", retention=Retention(last=1))
    store.prepare(state, {})
    time.sleep(2.0)  # a first training step, for example
    figures: dict[str, list[float]] = {"hpctrain": [], "hpctrain total": [], "torch": [], "torch total": []}
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{rendezvous}/store", rank=0, world_size=1
        )
        for step in range(1, rounds + 2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            store.async_save(step, state, {})
            stall = time.perf_counter() - begun
            store.wait(120)
            total = time.perf_counter() - begun
            assert all(isinstance(each, CommittedSave) for each in store.collect_outcomes())
            shutil.rmtree(folder / "torch", ignore_errors=True)
            begun = time.perf_counter()
            future = dcp.async_save(dict(state), checkpoint_id=folder / "torch")
            torch_stall = time.perf_counter() - begun
            future.result(120)
            torch_total = time.perf_counter() - begun
            if step > 1:  # without first allocations
                for values, one in zip(
                    figures.values(), (stall, total, torch_stall, torch_total), strict=True
                ):
                    values.append(1e3 * one)
        dist.destroy_process_group()
    store.close()
    name = f"{STATE_MB} MB on the GPU"
    results.add(f"{name}: pause for async_save", figures["hpctrain"], "ms")
    results.add(f"{name}: pause for dcp.async_save", figures["torch"], "ms")
    for end, of in (("", "pause"), (" total", "total time")):
        ratios = [
            own / other for own, other in zip(figures[f"hpctrain{end}"], figures[f"torch{end}"], strict=True)
        ]
        results.add(f"{name}: {of} ÷ {of} of dcp.async_save", ratios, headline=not end)


def add_restarts(results: Results, folder: Path, rounds: int) -> None:
    script_text = restart.SCRIPT
    for old, new in ON_GPU.items():
        assert old in script_text
        script_text = script_text.replace(old, new)
    for name in restart.SIDES:
        parts = [restart.restart_once(name, script_text, folder, 1, gpus=True) for _ in range(rounds)]
        seconds = [each["first step"] for each in parts]
        results.add(f"kill to next step, {name}", seconds, "s", headline=True)


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=3)
    results.parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    options = results.parse()
    if not torch.cuda.is_available():
        sys.exit("This benchmark requires a GPU, but torch finds none.")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    gpt = load_example()
    text = gpt.standard_library(4_000_000)
    out, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.dup2(quiet, 1)  # messages of the trainers
        begun = time.monotonic()
        parts: dict[str, Callable[[], None]] = {
            "steps": lambda: add_steps(results, gpt, text, options.rounds),
            "copies": lambda: add_copies(results, gpt, text, folder),
            "saves": lambda: add_saves(results, folder, options.rounds),
            "restarts": lambda: add_restarts(results, folder, max(1, options.rounds - 1)),
        }
        for part in options.only:
            parts[part]()
            print(f"{part}: until {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os.dup2(out, 1)
    results.finish()


if __name__ == "__main__":
    main()
