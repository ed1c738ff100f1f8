"""GPU measurements of all nodes reach the loggers. The tests write the telemetry files; there are no GPUs."""

from __future__ import annotations

import pytest
from helpers.logger_recorder import Recorder

from hpctrain.files import append_json_line, make_folder
from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers import LoggedRun
from hpctrain.telemetry.loggers.dispatcher import LoggerDispatcher, LoggerState

START = 1_764_000_000.0


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    make_folder(run.telemetry(0).parent)
    return run


def measure(run: RunDir, node: int, time: float, util: list[float | None], **more: object) -> None:
    append_json_line(run.telemetry(node), {"time": START + time, "host": "n", "gpu_util": util, **more})


def train(run: RunDir, *steps: int, attempt: int = 0) -> None:
    for step in steps:
        append_json_line(
            run.metrics, {"step": step, "time": START + step, "attempt": attempt, "loss": 1.0 / step}
        )


def dispatcher_of(run: RunDir, logger: Recorder) -> LoggerDispatcher:
    state = LoggerState.load(run.logger_state(logger.name))
    return LoggerDispatcher(logger, LoggedRun(run.run_id, run.path), run.metrics, state, print)


def sent(logger: Recorder) -> list[tuple[str, int, float]]:
    return [point for point in logger.points if point[0].startswith("gpu/")]


def test_gpus_of_all_nodes_are_sent_with_the_last_step(run):
    logger = Recorder()
    dispatcher = dispatcher_of(run, logger)
    train(run, 1, 2, 3)
    measure(run, 0, 2, [50.0, None], gpu_memory=[8, 9], gpu_throttled=[["power cap"], []])
    measure(run, 1, 2, [70.0, 80.0])
    assert dispatcher.advance()
    first = [
        ("gpu/node-000/0/util", 3, 50.0),
        ("gpu/node-000/0/memory", 3, 8.0),
        ("gpu/node-000/1/memory", 3, 9.0),
        ("gpu/node-001/0/util", 3, 70.0),
        ("gpu/node-001/1/util", 3, 80.0),
    ]
    assert sent(logger) == first
    assert [step for name, step, _ in logger.points if name == "loss"] == [1, 2, 3]
    train(run, 4)
    dispatcher.advance()
    assert sent(logger) == first, "without a new measurement, nothing is repeated"
    train(run, 5)
    measure(run, 1, 5, [10.0, 20.0])
    dispatcher.advance()
    assert sent(logger)[5:] == [("gpu/node-001/0/util", 5, 10.0), ("gpu/node-001/1/util", 5, 20.0)]


def test_gpu_measurements_survive_an_outage_and_are_not_repeated_after_a_restart(run):
    logger = Recorder()
    measure(run, 0, 0, [99.0])  # of an earlier attempt
    dispatcher = dispatcher_of(run, logger)
    train(run, 1, 2)
    measure(run, 0, 2, [50.0])
    logger.fails = True
    assert not dispatcher.advance()
    logger.fails = False
    train(run, 3)
    dispatcher.advance()
    assert sent(logger) == [("gpu/node-000/0/util", 3, 50.0)]
    again = dispatcher_of(run, logger)
    train(run, 2, attempt=1)
    measure(run, 0, 3, [60.0])
    again.advance()
    assert sent(logger)[1:] == [], "the tracker cannot go back to step 2"
    train(run, 3, 4, attempt=1)
    again.advance()
    assert sent(logger)[1:] == [("gpu/node-000/0/util", 4, 60.0)]


def test_many_gpus_are_summarized(run):
    logger = Recorder()
    dispatcher = dispatcher_of(run, logger)
    for node in range(9):
        append_json_line(run.telemetry(node), {"time": START, "gpu_names": ["A"] * 8})
    train(run, 1)
    measure(run, 0, 1, [10.0] * 8)
    measure(run, 1, 1, [30.0] * 8)
    dispatcher.advance()
    assert sent(logger) == [("gpu/mean/util", 1, 20.0), ("gpu/min/util", 1, 10.0), ("gpu/max/util", 1, 30.0)]
    train(run, 2)
    measure(run, 1, 2, [50.0] * 8)
    dispatcher.advance()
    assert sent(logger)[3:] == [
        ("gpu/mean/util", 2, 30.0),
        ("gpu/min/util", 2, 10.0),
        ("gpu/max/util", 2, 50.0),
    ]
