"""Cost of heartbeats for the training: microseconds per step and per second.

    python benchmarks/heartbeat.py [--steps N] [--rounds N] [--limit MICROSECONDS]

Each round runs three loops alternately. The first sets the attributes that the training sets in every step.
The second is empty. The third also times the step, as the Trainer does to find slow ranks. The costs are the
differences of the fastest rounds, because noise can only increase times. The last figure is the work of the
heartbeat thread once per second, which holds Python's lock. Exits with 1 if the cost per step exceeds the
limit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch

from hpctrain.runtime.heartbeat import heartbeat_message
from hpctrain.runtime.rank_activity import activity
from hpctrain.training.observe.compute_timer import ComputeTimer

_BEATS = 1000


def empty(steps: int) -> None:
    for _ in range(steps):
        pass


def told(steps: int) -> None:
    for _ in range(steps):
        activity.set_phase("data")
        activity.set_phase("step")
        activity.step_done()


def timed(steps: int) -> None:
    module = torch.nn.Linear(1, 1)
    clock = ComputeTimer(module, torch.optim.SGD(module.parameters()), torch.device("cpu"))
    for _ in range(steps):
        activity.set_phase("data")
        activity.set_phase("step")
        with clock.step():
            clock._record_last_gradient(module.weight)
            clock._record_update()


def beats(count: int) -> None:
    started_with = dict(os.environ)
    for _ in range(count):
        json.dumps(heartbeat_message(started_with))


def microseconds(run: Callable[[int], None], count: int) -> float:
    begun = time.perf_counter()
    run(count)
    return (time.perf_counter() - begun) / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=2.0)
    options = parser.parse_args()
    rounds = [
        [microseconds(run, options.steps) for run in (empty, told, timed)] for _ in range(options.rounds)
    ]
    nothing, ours, with_clock = (min(times) for times in zip(*rounds, strict=True))
    cost = ours - nothing
    print(f"in the training, per step        {cost:6.2f} µs    (limit {options.limit:g} µs)")
    print(f"with step times     {with_clock - nothing:6.2f} µs")
    once = min(microseconds(beats, _BEATS) for _ in range(options.rounds))
    print(f"heartbeat thread, per second       {once:6.1f} µs")
    sys.exit(cost > options.limit)


if __name__ == "__main__":
    main()
