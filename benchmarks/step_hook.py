"""Cost of the optimizer hooks that observe scripts without the Trainer, per step.

    python benchmarks/step_hook.py [--rounds N] [--steps N]

A small optimizer steps with and without the hooks, alternately in the same process. The cost is the
difference of the medians over all rounds. A training loop with short steps is measured in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from results import Results
from torch.optim import optimizer as hooks

from hpctrain.cluster import detect
from hpctrain.rundir import RunDir
from hpctrain.runtime.program.process_observer import ProcessObserver
from hpctrain.runtime.program.step_hook import install_step_hook
from hpctrain.runtime.rank_activity import activity


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=200)
    results.parser.add_argument("--steps", type=int, default=200)
    options = results.parse()
    torch.set_num_threads(1)

    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.zeros(1)
    tiny = torch.optim.SGD([parameter], lr=0.1)
    layer = torch.nn.Linear(32, 32)
    short = torch.optim.Adam(layer.parameters())
    batch = torch.ones(32, 32)

    def train() -> None:
        layer(batch).sum().backward()
        short.step()
        short.zero_grad()

    with_us, without_us = measure(tiny.step, options.rounds, options.steps)
    results.add("hooks", with_us - without_us, "µs per step", limit=3.0, headline=True)
    with_us, without_us = measure(train, options.rounds, options.steps // 10)
    results.add("step of a short training loop, without hooks", without_us, "µs")
    results.add("with hooks ÷ without", with_us / without_us)
    results.finish()


def measure(step: Callable[[], object], rounds: int, steps: int) -> tuple[float, float]:
    """Return the median time of a step in microseconds, with and without the hooks."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * rounds):
        hooked = number % 2 == 0
        with installed() if hooked else absent():
            step()
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            seconds[hooked].append((time.perf_counter() - begun) / steps)
    return statistics.median(seconds[True]) * 1e6, statistics.median(seconds[False]) * 1e6


@contextmanager
def installed() -> Iterator[None]:
    before = dict(hooks._global_optimizer_post_hooks), dict(hooks._global_optimizer_pre_hooks)
    activity.step = activity.optimizer_steps = 0
    ranks = detect({})
    observer = ProcessObserver(RunDir(Path()), 0, ranks, ranks.torch_variables(), records_steps=False)
    install_step_hook(observer.after_step)
    yield
    for registered, old in zip(
        (hooks._global_optimizer_post_hooks, hooks._global_optimizer_pre_hooks), before, strict=True
    ):
        registered.clear()
        registered.update(old)


@contextmanager
def absent() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
