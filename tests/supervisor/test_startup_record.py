"""The record of an attempt's start, from the messages of its ranks."""

import pytest

from hpctrain import system
from hpctrain.jobs.runs.run_log_reader import describe_event
from hpctrain.record_types import PartDuration, RankMessage
from hpctrain.rundir import RunDir
from hpctrain.supervisor.workers.startup_record import StartupRecord
from hpctrain.telemetry.startup_parts import StartupPart, durations_s

PARTS = [part.value for part in StartupPart if part is not StartupPart.JOB]


@pytest.fixture
def start_record(tmp_path, monkeypatch):
    monkeypatch.setattr(system, "time", lambda: 1000.0)
    run = RunDir(tmp_path)

    def start(world_size=4, job_started_at=None):
        return run, StartupRecord(run, 0, world_size, lambda rank: f"n{rank // 2 + 1}", job_started_at)

    return start


def startup_message(*seconds, begun=1000.0):
    """Return the message of a rank whose parts took these times."""
    ends, end = {}, begun
    for part, duration in zip(PARTS, seconds, strict=False):
        ends[part] = end = end + duration
    return RankMessage(startup=ends)


def test_event_names_the_slowest_node_of_each_part(start_record):
    run, record = start_record(job_started_at=993.5)
    for rank in range(3):
        record.on_message(rank, startup_message(1, 1, 1, 4, 1, 1, 1, 1, 1))
    assert not list(run.read_events())
    record.on_message(3, startup_message(3, 1, 1, 4, 1, 1, 1, 1, 1))
    (event,) = run.read_events()
    assert event.seconds == 14
    assert event.parts["job"] == PartDuration(6.5, 6.5)
    assert event.parts["launch"] == PartDuration(1, 3, "n2")
    assert list(event.parts) == list(StartupPart)
    assert list(event.slowest_nodes) == ["n2", "n1"]
    assert event.slowest_nodes["n2"]["launch"] == 3
    line = "attempt 0: the first step ended 14.0 s after the start (imports 4.0 s, launch 3.0 s, "
    assert describe_event(event).startswith(line)


def test_parts_that_ended_before_the_attempt_took_no_time():
    ends = {"launch": 900.0, "interpreter": 901.0, "imports": 1002.0, "first step": 1002.5}
    assert durations_s(1000.0, ends) == {"launch": 0, "interpreter": 0, "imports": 2, "first step": 0.5}
