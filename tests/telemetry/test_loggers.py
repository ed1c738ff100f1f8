"""Loggers get each step once, whatever happens; those of trackers with the trackers' own clients, offline."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
from helpers import tracker_files
from helpers.commands import environment

from hpctrain.errors import UserError
from hpctrain.files import append_json_line
from hpctrain.rundir import RunDir
from hpctrain.serialization import dumps
from hpctrain.telemetry.loggers import Csv, LoggedRun, Logger, Neptune, TensorBoard, find_loggers
from hpctrain.telemetry.loggers.dispatcher import LoggerDispatcher
from hpctrain.telemetry.loggers.logger_state import LoggerState
from hpctrain.telemetry.loggers.process import LoggerConfig


class Recorder:
    """Keeps what it gets; a tracker that cannot take anything back, unless it is told that it can."""

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
    run.path.mkdir()
    return run


def train(run: RunDir, attempt: int, first: int, last: int, *, scale: float = 1.0) -> None:
    """Write what a training writes that goes from one step to another, and validates at every tenth."""
    for step in range(first, last + 1):
        line = {"step": step, "epoch": 0, "time": 1_764_000_000.0 + step, "attempt": attempt}
        line |= {"loss": scale / step, "spent": {"all": 1.0}}
        if step % 10 == 0:
            line["val_loss"] = scale * step
        append_json_line(run.metrics, line)


def feed(run: RunDir, logger: Logger, say: list[str] | None = None) -> LoggerDispatcher:
    """What brings metrics to the logger, as a new start of the ranks has it."""
    memory = LoggerState.load(run.logger_state(logger.name))
    tell = ([] if say is None else say).append
    return LoggerDispatcher(logger, LoggedRun(run.run_id, run.path), run.metrics, memory, tell)


def expected(*pieces: tuple[int, int, float]) -> list[tuple[str, int, float]]:
    steps = {step: scale for first, last, scale in pieces for step in range(first, last + 1)}
    losses = [("loss", step, scale / step) for step, scale in steps.items()]
    return sorted(
        losses + [("val_loss", step, scale * step) for step, scale in steps.items() if step % 10 == 0]
    )


def test_steps_that_are_trained_again_do_not_come_again(run):
    logger = Recorder()
    train(run, 0, 1, 25)
    assert feed(run, logger).advance()
    train(run, 1, 21, 40, scale=2)
    assert feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 25, 1), (26, 40, 2))
    assert logger.known == [None, "abc"]


def test_a_logger_that_can_takes_them_back(run):
    logger = Recorder(rewinds=True)
    train(run, 0, 1, 25)
    feed(run, logger).advance()
    train(run, 1, 21, 40, scale=2)
    feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 20, 1), (21, 40, 2))


def test_two_starts_read_at_once(run):
    """As where the process of the first start was killed before it had read anything."""
    for rewinds in (False, True):
        logger = Recorder(rewinds=rewinds)
        logger.name = f"recorder-{rewinds}"
        train(run, 0, 1, 25)
        train(run, 1, 21, 40)
        feed(run, logger).advance()
        assert sorted(logger.points) == expected((1, 40, 1))
        run.metrics.unlink()


def test_a_metric_that_comes_late_of_a_step_that_was_logged_is_new(run):
    logger = Recorder()
    train(run, 0, 1, 9)
    feed(run, logger).advance()
    line = {"step": 9, "time": 1.0, "attempt": 1, "loss": 7.0, "val_loss": 8.0}
    append_json_line(run.metrics, line)
    feed(run, logger).advance()
    assert logger.points[-1] == ("val_loss", 9, 8.0)
    assert [point for point in logger.points if point[:2] == ("loss", 9)] == [("loss", 9, 1 / 9)]


def test_lines_that_a_tracker_does_not_take_come_later(run):
    logger, said = Recorder(), []
    logger.fails = True
    one = feed(run, logger, said)
    train(run, 0, 1, 10)
    assert not one.advance()
    assert not one.advance()
    assert len(said) == 1
    assert "ConnectionError: no network" in said[0]
    logger.fails = False
    assert one.advance()
    assert "again" in said[1]
    assert sorted(logger.points) == expected((1, 10, 1))


def test_lines_that_a_tracker_did_not_take_come_in_the_next_start(run):
    logger = Recorder()
    logger.fails = True
    train(run, 0, 1, 10)
    feed(run, logger).advance()
    logger.fails = False
    train(run, 1, 6, 12)
    feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 12, 1))


def test_what_was_on_its_way_when_the_process_was_killed_is_not_sent_twice(run):
    class Killed(BaseException):
        pass

    logger = Recorder()
    train(run, 0, 1, 10)
    one = feed(run, logger)
    take = logger.log

    def log(lines) -> None:
        take(lines)
        # From here on nothing is written down any more.
        one._state.save = lambda sending=None: None
        raise Killed

    logger.log = log
    with pytest.raises(Killed):
        one.advance()
    logger.log = take
    train(run, 1, 6, 12)
    feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 12, 1))


def test_a_kill_while_much_is_brought_costs_a_few_steps_at_most(run):
    class Killed(BaseException):
        pass

    logger = Recorder()
    train(run, 0, 1, 100)
    one = feed(run, logger)
    take = logger.log

    def log(lines) -> None:
        if logger.points:
            one._state.save = lambda sending=None: None
            raise Killed
        take(lines)

    logger.log = log
    with pytest.raises(Killed):
        one.advance()
    logger.log = take
    feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 32, 1), (65, 100, 1))


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"known": 3}', '{"known": null, "offset": "x"}', "\xff"])
def test_a_memory_that_is_damaged_is_none(run, damage):
    path = run.logger_state("recorder")
    path.parent.mkdir()
    path.write_text(damage, encoding="latin-1")
    logger = Recorder()
    train(run, 0, 1, 3)
    assert feed(run, logger).advance()
    assert sorted(logger.points) == expected((1, 3, 1))


def test_lines_that_are_cut_and_a_file_that_was_replaced(run):
    logger = Recorder()
    train(run, 0, 1, 12)
    with run.metrics.open("a") as file:
        file.write('{"step": 13, "ti\n[]\n{"step": "x", "time": 1}\n{"step": 14, "time": 1, "loss": 5.0')
    one = feed(run, logger)
    one.advance()
    assert sorted(logger.points) == expected((1, 12, 1))
    run.metrics.unlink()
    train(run, 0, 12, 13)
    one.advance()
    assert sorted(logger.points) == expected((1, 13, 1))


def test_lines_that_come_before_the_end_are_brought(run):
    logger, ended = Recorder(), threading.Event()
    thread = threading.Thread(target=feed(run, logger).run, args=(ended, lambda: "stopped"))
    thread.start()
    train(run, 0, 1, 5)
    ended.set()
    thread.join(10)
    assert sorted(logger.points) == expected((1, 5, 1))
    assert logger.endings == ["stopped"]


def test_the_table_grows_by_a_column_and_is_cut_where_steps_come_again(run):
    train(run, 0, 1, 12)
    feed(run, Csv()).advance()
    assert (run.path / "metrics.csv").read_text().startswith("step,epoch,time,attempt,loss,val_loss\n1,0,")
    train(run, 1, 11, 14, scale=3)
    append_json_line(run.metrics, {"step": 15, "time": 1.0, "attempt": 1, "a,b\n'\"": 0.5, "step ": 1})
    feed(run, Csv()).advance()
    points = tracker_files.csv_points(run.path)
    assert ("a,b\n'\"", 15, 0.5) in points
    assert sorted(point for point in points if "loss" in point[0]) == expected((1, 10, 1), (11, 14, 3))


@pytest.mark.parametrize(
    ("loggers", "words"),
    [
        ("cvs", "Did you mean 'csv'"),
        (["cvs"], "Did you mean 'csv'"),
        ([3], "3 is not a logger"),
        (["csv", "csv"], "2 loggers are named 'csv'"),
        ([Csv(name="../x")], "must be a valid file name"),
    ],
)
def test_what_is_no_logger_is_refused(loggers, words):
    with pytest.raises(UserError, match=words):
        find_loggers(loggers)


def test_a_package_that_is_missing_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr("hpctrain.telemetry.loggers.logger_registry.find_spec", lambda name: None)
    assert find_loggers(["csv"])[0].name == "csv"
    with pytest.raises(UserError, match=r"pip install 'hpctrain\[wandb\]'"):
        find_loggers(["wandb"])
    with pytest.raises(UserError, match=r"pip install 'hpctrain\[tensorboard\]'"):
        find_loggers([TensorBoard(folder="x")])


def test_it_is_said_that_the_service_of_neptune_has_ended(monkeypatch, run, capsys):
    monkeypatch.setitem(sys.modules, "neptune_scale", Mock())
    Neptune().start(LoggedRun("r", run.path))
    assert "Neptune's hosted service has ended." in capsys.readouterr().err
    monkeypatch.setattr("hpctrain.telemetry.loggers.logger_registry.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'hpctrain\[neptune\]'.* hosted service has ended\."):
        find_loggers(["neptune"])


CLIENTS = {
    "csv": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "neptune": "neptune_scale",
}
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "NEPTUNE_PROJECT": "a/b"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_the_real_client_has_each_step_once_in_one_run(run, name):
    package = CLIENTS[name]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    known = []
    starts = [(1, 25, "stopped"), (21, 45, "completed")]
    for attempt, (first, last, ending) in enumerate(starts):
        # TensorBoard reads its files in the order of their names, which begin with the second of the start.
        time.sleep(1 - time.time() % 1)
        train(run, attempt, first, last)
        log_all(run, name, ending)
        known.append(json.loads(run.logger_state(name).read_text())["known"])
    assert len(set(known)) == 1
    points = getattr(tracker_files, f"{name}_points")(run.path)
    assert Counter(point[:2] for point in points).most_common(1)[0][1] == 1
    told = {point[:2]: point[2] for point in points}
    assert told == {point[:2]: pytest.approx(point[2], rel=1e-6) for point in expected((1, 45, 1))}


def log_all(run: RunDir, name: str, ending: str) -> None:
    """Have the process of the loggers bring everything, as one start of the ranks has it."""
    order = LoggerConfig(
        str(run.path), {"global_batch_size": 32}, [], dumps(find_loggers([name]), "test", [])
    )
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.telemetry.loggers.process"],
        input=order.to_bytes() + f"{ending}\n".encode(),
        env=environment(OFFLINE),
        cwd=run.path,
        capture_output=True,
        timeout=90,
    )
    assert done.returncode == 0
    assert b"does not accept metrics" not in done.stderr, done.stderr
