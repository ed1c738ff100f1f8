"""Cost of heartbeats and straggler detection for training.

    python benchmarks/heartbeat.py [--steps N] [--rounds N]

Each round runs three loops alternately: an empty one, one that sets the attributes that the Trainer sets in
every step, and one that also times the step, as the Trainer does to find slow ranks. The costs are the
differences between the fastest rounds, because noise can only increase times. The heartbeat thread runs once
per second, and holds Python's global interpreter lock while it runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import torch
from results import Results

from hpctrain.cluster import detect
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.program.heartbeat import heartbeat_message
from hpctrain.runtime.rank_activity import activity
from hpctrain.training.observe.step_timers import ComputeTimer

_BEATS = 1000


def empty(steps: int) -> None:
    for _ in range(steps):
        pass


def reported(steps: int) -> None:
    for _ in range(steps):
        activity.set_phase("data")
        activity.set_phase("step")
        activity.step_done()


def timed(steps: int) -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    clock = ComputeTimer(module, optimizer, DistributedContext(detect({}), torch.device("cpu"), None))
    for _ in range(steps):
        activity.set_phase("data")
        activity.set_phase("step")
        clock.begin()
        clock._record_last_gradient(module.weight)
        clock._record_update()
        clock.end()


def send_heartbeats(count: int) -> None:
    started_with = dict(os.environ)
    for _ in range(count):
        json.dumps(heartbeat_message(started_with))


def microseconds(run: Callable[[int], None], count: int) -> float:
    begun = time.perf_counter()
    run(count)
    return (time.perf_counter() - begun) / count * 1e6


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--steps", type=int, default=200_000)
    results.parser.add_argument("--rounds", type=int, default=7)
    options = results.parse()
    rounds = [
        [microseconds(run, options.steps) for run in (empty, reported, timed)] for _ in range(options.rounds)
    ]
    nothing, ours, with_clock = (min(times) for times in zip(*rounds, strict=True))
    results.add("in the training thread", ours - nothing, "µs per step", limit=2.0)
    results.add("in the training thread, with straggler detection", with_clock - nothing, "µs per step")
    once = [microseconds(send_heartbeats, _BEATS) for _ in range(options.rounds)]
    results.add("in the heartbeat thread", once, "µs per second")
    results.finish()


if __name__ == "__main__":
    main()
