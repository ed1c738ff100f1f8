"""Loggers get each step once, after any failure; trackers are tested with their own clients, offline."""

import json
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
from helpers import tracker_files
from helpers.commands import environment
from helpers.fake_gpu_driver import DetailedFakeDriver, install_fake_driver
from helpers.waiting import wait_for

from hpctrain.errors import UserError
from hpctrain.files import append_json_line, make_folder
from hpctrain.records.call_payload import dumps
from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers import Csv, LoggedRun, Logger, Neptune, TensorBoard, find_loggers
from hpctrain.telemetry.loggers.dispatcher import LoggerConfig, LoggerDispatcher
from hpctrain.telemetry.sampling.nvml import GpuReader
from hpctrain.telemetry.sampling.sampler import ProcfsReader, TelemetrySampler


class Recorder:
    """Keeps its metrics; like a tracker, it cannot remove any, unless `rewinds` is set."""

    name = "recorder"

    def __init__(self, *, rewinds: bool = False) -> None:
        self.points: list[tuple[str, int, float]] = []
        self.known: list[str | None] = []
        self.rewinds, self.fails, self.endings = rewinds, False, []

    def start(self, run: LoggedRun) -> str:
        self.known.append(run.known)
        return run.known or "abc"

    def log(self, lines) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.points += [(name, line.step, value) for line in lines for name, value in line.values.items()]

    def rewind(self, step: int) -> bool:
        if self.rewinds:
            self.points = [point for point in self.points if point[1] <= step]
        return self.rewinds

    def finish(self, ending: str) -> None:
        self.endings.append(ending)


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    make_folder(run.telemetry(0).parent)
    return run


def train(run: RunDir, attempt: int, first: int, last: int, *, scale: float = 1.0) -> None:
    """Write a training's metrics from one step to another, with a validation at every tenth."""
    for step in range(first, last + 1):
        line = {"step": step, "epoch": 0, "time": 1_764_000_000.0 + step, "attempt": attempt}
        line |= {"loss": scale / step, "spent": {"all": 1.0}}
        if step % 10 == 0:
            line["val_loss"] = scale * step
        append_json_line(run.metrics, line)


def dispatcher_of(run: RunDir, logger: Logger, messages: list[str] | None = None) -> LoggerDispatcher:
    """Return the logger's dispatcher, as in a new attempt."""
    report = ([] if messages is None else messages).append
    return LoggerDispatcher(logger, LoggedRun(run.run_id, run.path), report)


def expected(*pieces: tuple[int, int, float]) -> list[tuple[str, int, float]]:
    steps = {step: scale for first, last, scale in pieces for step in range(first, last + 1)}
    losses = [("loss", step, scale / step) for step, scale in steps.items()]
    return sorted(
        losses + [("val_loss", step, scale * step) for step, scale in steps.items() if step % 10 == 0]
    )


@pytest.mark.parametrize("rewinds", [False, True])
@pytest.mark.parametrize("reads_between", [False, True])
def test_repeated_steps_are_logged_once(run, rewinds, reads_between):
    """Without a read between, the process of the first attempt was killed before it read anything."""
    logger = Recorder(rewinds=rewinds)
    train(run, 0, 1, 25)
    if reads_between:
        dispatcher_of(run, logger).advance()
    train(run, 1, 21, 40, scale=2)
    dispatcher_of(run, logger).advance()
    assert sorted(logger.points) == expected((1, 20, 1), (21, 25, 2 if rewinds else 1), (26, 40, 2))
    assert logger.known == ([None, "abc"] if reads_between else [None])


def test_rejected_metrics_are_sent_later(run):
    logger, messages = Recorder(), []
    logger.fails = True
    dispatcher = dispatcher_of(run, logger, messages)
    train(run, 0, 1, 10)
    assert not dispatcher.advance()
    assert not dispatcher.advance()
    assert len(messages) == 1
    assert "ConnectionError: no network" in messages[0]
    logger.fails = False
    assert dispatcher.advance()
    assert "again" in messages[1]
    assert sorted(logger.points) == expected((1, 10, 1))


def test_metrics_in_flight_during_a_kill_are_not_sent_twice(run):
    class Killed(BaseException):
        pass

    logger = Recorder()
    train(run, 0, 1, 10)
    dispatcher = dispatcher_of(run, logger)
    original_log = logger.log

    def log(lines) -> None:
        original_log(lines)
        # From here on, no state is saved.
        dispatcher._save_state = lambda sending=None: None
        raise Killed

    logger.log = log
    with pytest.raises(Killed):
        dispatcher.advance()
    logger.log = original_log
    train(run, 1, 6, 12)
    dispatcher_of(run, logger).advance()
    assert sorted(logger.points) == expected((1, 12, 1))


def test_cut_lines_and_a_replaced_file_are_handled(run):
    logger = Recorder()
    train(run, 0, 1, 12)
    with run.metrics.open("a") as file:
        file.write('{"step": 13, "ti\n[]\n{"step": "x", "time": 1}\n{"step": 14, "time": 1, "loss": 5.0')
    dispatcher = dispatcher_of(run, logger)
    dispatcher.advance()
    assert sorted(logger.points) == expected((1, 12, 1))
    run.metrics.unlink()
    train(run, 0, 12, 13)
    dispatcher.advance()
    assert sorted(logger.points) == expected((1, 13, 1))


def measure(run: RunDir, node: int, time: float, util: list[float | None], **more: object) -> None:
    append_json_line(
        run.telemetry(node), {"time": 1_764_000_000.0 + time, "host": "n", "gpu_util": util, **more}
    )


def sent(logger: Recorder) -> list[tuple[str, int, float]]:
    return [point for point in logger.points if point[0].startswith("gpu/")]


def test_gpus_of_all_nodes_are_sent_with_the_last_step(run):
    logger = Recorder()
    dispatcher = dispatcher_of(run, logger)
    train(run, 0, 1, 3)
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
    train(run, 0, 4, 4)
    dispatcher.advance()
    assert sent(logger) == first, "without a new measurement, nothing is repeated"
    train(run, 0, 5, 5)
    measure(run, 1, 5, [10.0, 20.0])
    dispatcher.advance()
    assert sent(logger)[5:] == [("gpu/node-001/0/util", 5, 10.0), ("gpu/node-001/1/util", 5, 20.0)]


def test_gpu_measurements_survive_an_outage_and_are_not_repeated_after_a_restart(run):
    logger = Recorder()
    measure(run, 0, 0, [99.0])  # of an earlier attempt
    dispatcher = dispatcher_of(run, logger)
    train(run, 0, 1, 2)
    measure(run, 0, 2, [50.0])
    logger.fails = True
    assert not dispatcher.advance()
    logger.fails = False
    train(run, 0, 3, 3)
    dispatcher.advance()
    assert sent(logger) == [("gpu/node-000/0/util", 3, 50.0)]
    again = dispatcher_of(run, logger)
    train(run, 1, 2, 2)
    measure(run, 0, 3, [60.0])
    again.advance()
    assert sent(logger)[1:] == [], "the tracker cannot go back to step 2"
    train(run, 1, 3, 4)
    again.advance()
    assert sent(logger)[1:] == [("gpu/node-000/0/util", 4, 60.0)]


def test_many_gpus_are_summarized(run):
    logger = Recorder()
    dispatcher = dispatcher_of(run, logger)
    for node in range(9):
        append_json_line(run.telemetry(node), {"time": 1_764_000_000.0, "gpu_names": ["A"] * 8})
    train(run, 0, 1, 1)
    measure(run, 0, 1, [10.0] * 8)
    measure(run, 1, 1, [30.0] * 8)
    dispatcher.advance()
    assert sent(logger) == [("gpu/mean/util", 1, 20.0), ("gpu/min/util", 1, 10.0), ("gpu/max/util", 1, 30.0)]
    train(run, 0, 2, 2)
    measure(run, 1, 2, [50.0] * 8)
    dispatcher.advance()
    assert sent(logger)[3:] == [
        ("gpu/mean/util", 2, 30.0),
        ("gpu/min/util", 2, 10.0),
        ("gpu/max/util", 2, 50.0),
    ]


def test_csv_table_adds_columns_and_drops_repeated_steps(run):
    train(run, 0, 1, 12)
    dispatcher_of(run, Csv()).advance()
    assert (run.path / "metrics.csv").read_text().startswith("step,epoch,time,attempt,loss,val_loss\n1,0,")
    train(run, 1, 11, 14, scale=3)
    append_json_line(run.metrics, {"step": 15, "time": 1.0, "attempt": 1, "a,b\n'\"": 0.5, "step ": 1})
    dispatcher_of(run, Csv()).advance()
    points = tracker_files.csv_points(run.path)
    assert ("a,b\n'\"", 15, 0.5) in points
    assert sorted(point for point in points if "loss" in point[0]) == expected((1, 10, 1), (11, 14, 3))


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        (["cvs"], "Did you mean 'csv'"),
        ([3], "3 is not a logger"),
        (["csv", "csv"], "2 loggers are named 'csv'"),
        ([Csv(name="../x")], "is not a valid logger name"),
    ],
)
def test_invalid_loggers_are_refused(loggers, message):
    with pytest.raises(UserError, match=message):
        find_loggers(loggers)


def test_missing_package_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr("hpctrain.telemetry.loggers.logger.find_spec", lambda name: None)
    assert find_loggers(["csv"])[0].name == "csv"
    with pytest.raises(UserError, match="Run `pip install wandb`"):
        find_loggers(["wandb"])
    with pytest.raises(UserError, match="Run `pip install tensorboard`"):
        find_loggers([TensorBoard(folder="x")])


def test_end_of_the_neptune_service_is_stated(monkeypatch, run, capsys):
    monkeypatch.setitem(sys.modules, "neptune_scale", Mock())
    Neptune().start(LoggedRun("r", run.path))
    assert "Neptune's hosted service has shut down" in capsys.readouterr().err
    monkeypatch.setattr("hpctrain.telemetry.loggers.logger.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install neptune-scale.* hosted service has shut down"):
        find_loggers(["neptune"])


CLIENTS = {name: name for name in ("csv", "tensorboard", "wandb", "mlflow")} | {"neptune": "neptune_scale"}
TRACKERS = [
    "tensorboard",
    "wandb",
    *(pytest.param(name, marks=pytest.mark.long) for name in ("mlflow", "neptune")),
]
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "a/b"}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", ["csv", *TRACKERS])
def test_real_client_has_each_step_once_in_one_run(run, name):
    if find_spec(CLIENTS[name]) is None:
        pytest.skip(f"{CLIENTS[name]} is not installed")
    run_ids = []
    starts = [(1, 25, "stopped"), (21, 45, "completed")]
    for attempt, (first, last, ending) in enumerate(starts):
        # TensorBoard reads its files in order of their names, which begin with the second of the start.
        time.sleep(1 - time.time() % 1)
        train(run, attempt, first, last)
        process = start_loggers(run, name)
        # After a stop, the logger has only seconds.
        wait_for(run.logger_state(name).exists, 60, "the start of the logger")
        end_loggers(process, name, ending)
        run_ids.append(json.loads(run.logger_state(name).read_text())["known"])
    assert len(set(run_ids)) == 1
    points = getattr(tracker_files, f"{name}_points")(run.path)
    assert Counter(point[:2] for point in points).most_common(1)[0][1] == 1
    values = {point[:2]: point[2] for point in points}
    assert values == {point[:2]: pytest.approx(point[2], rel=1e-6) for point in expected((1, 45, 1))}


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("name", TRACKERS)
def test_real_client_receives_measurements_of_fake_gpus_on_all_nodes(run, name, monkeypatch):
    if find_spec(CLIENTS[name]) is None:
        pytest.skip(f"{CLIENTS[name]} is not installed")
    install_fake_driver(monkeypatch, DetailedFakeDriver())
    process = start_loggers(run, name)
    # Measurements of earlier attempts are not sent, so these must be newer than the process.
    wait_for(run.logger_state(name).exists, 60, "the start of the logger")
    for node in range(2):
        with GpuReader() as gpus:
            clocks = {"clock": iter(range(0, 100, 10)).__next__, "now": lambda: 1_764_000_003.0}
            path = run.telemetry(node)
            sampler = TelemetrySampler(path, gpus, ProcfsReader(), host=f"n{node}", run_id="r", **clocks)
            sampler.begin()
            sampler.read()
    train(run, 0, 1, 3)
    end_loggers(process, name, "completed")
    points = getattr(tracker_files, f"{name}_points")(run.path)
    for node in ("node-000", "node-001"):
        for quantity, value in (("util", 83), ("temp_c", 71), ("clock_mhz", 1410), ("power_w", 300)):
            assert (f"gpu/{node}/0/{quantity}", 3, pytest.approx(value)) in points


def start_loggers(run: RunDir, name: str) -> subprocess.Popen[bytes]:
    config = LoggerConfig(
        str(run.path), {"global_batch_size": 32}, [], dumps(find_loggers([name]), "test", [])
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain.telemetry.loggers.dispatcher"],
        env=environment(OFFLINE),
        cwd=run.path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(config.to_bytes())
    process.stdin.flush()
    return process


def end_loggers(process: subprocess.Popen[bytes], name: str, ending: str) -> None:
    _, stderr = process.communicate(f"{ending}\n".encode(), timeout=90)
    assert process.returncode == 0
    assert f"the logger {name!r} failed".encode() not in stderr, stderr
