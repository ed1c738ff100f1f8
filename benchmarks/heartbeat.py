"""What telling the supervisor where a rank is costs the training: microseconds a step, and a second.

    python benchmarks/heartbeat.py [--steps N] [--rounds N] [--limit MICROSECONDS]

In each round a loop that sets what the training sets in every step (waits for data, in the step, done) takes
turns with an empty one, and with one that times the step as the Trainer does to find slow ranks; the
differences of the fastest rounds are the cost, which noise can only raise. The last figure is what the thread
beside the training does once a second: that takes Python's lock. Exits with 1 where telling costs more than
the limit.
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
    print(f"in the training, a step        {cost:6.2f} µs    (limit {options.limit:g} µs)")
    print(f"with the times of the step     {with_clock - nothing:6.2f} µs")
    once = min(microseconds(beats, _BEATS) for _ in range(options.rounds))
    print(f"beside it, once a second       {once:6.1f} µs")
    sys.exit(cost > options.limit)


if __name__ == "__main__":
    main()
