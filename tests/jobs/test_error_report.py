import json

import pytest
from helpers.run_histories import event

from hpctrain.jobs.runs.error_report import failures_since_submission, report_failure
from hpctrain.rundir import RunDir

LOST = "Connection closed by peer [127.0.0.1]:1234\nmore of it"


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "r")
    run.failures.mkdir(parents=True)
    return run


def fail(run: RunDir, rank: int, error: str, message: str, traceback: str = "", attempt: int = 0) -> None:
    log = run.rank_log(attempt, rank)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"line {number}\n" for number in range(1, 31)))
    record = {
        "rank": rank,
        "node": f"n{rank // 2}",
        "host": "h",
        "kind": "exception",
        "error": error,
        "message": message,
    }
    run.failure(attempt, rank).write_text(json.dumps({**record, "traceback": traceback, "log": str(log)}))


def test_cause_is_shown_in_full_and_its_consequences_in_short(run):
    fail(run, 3, "ValueError", "no such thing", "Traceback:\n  here\nValueError: no such thing\n")
    for rank in (0, 1, 2, 5):
        fail(run, rank, "RuntimeError", LOST, "a traceback that nobody needs")
    fail(run, 4, "SIGKILL", "")
    failure = event("failure", rank=3, cause="rank 3 on n1: ValueError: no such thing")
    assert list(report_failure(run, failure)) == [
        "attempt 0: rank 3 on n1: ValueError: no such thing",
        "Traceback:",
        "  here",
        "ValueError: no such thing",
        f"log: {run.rank_log(0, 3)}",
        "also ranks 0-2, 5: RuntimeError: Connection closed by peer [127.0.0.1]:1234",
        "also rank 4: SIGKILL",
    ]


def test_failure_without_traceback_shows_the_end_of_the_log(run):
    fail(run, 1, "SIGSEGV", "")
    lines = list(report_failure(run, event("failure", rank=1, cause="rank 1 on n0: SIGSEGV")))
    assert lines[1] == f"last lines of {run.rank_log(0, 1)}:"
    assert lines[2:] == [f"  line {number}" for number in range(11, 31)]


def test_requested_ranks_are_shown_in_full(run):
    fail(run, 0, "ValueError", "boom", "first traceback")
    fail(run, 1, "RuntimeError", LOST, "second traceback")
    lines = list(report_failure(run, event("failure", rank=0, cause="x"), ranks=[1]))
    assert lines[1:3] == [
        "rank 1 on n0: RuntimeError: Connection closed by peer [127.0.0.1]:1234",
        "second traceback",
    ]
    assert not any("also" in line or "first traceback" in line for line in lines)


def test_successor_job_continues_the_submission(run):
    run.log_event("submitted", 0, job_id="1", backend="slurm")
    run.log_event("failure", 0, cause="in the first job")
    run.log_event("submitted", 1, job_id="2", backend="slurm", after="1")
    failures = failures_since_submission(run.read_events())
    assert [failure.cause for failure in failures] == ["in the first job"]
