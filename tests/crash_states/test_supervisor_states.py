"""Leases, claims and records of a run after a power loss at any moment, in every state of the disk."""

import json
import time
from pathlib import Path
from random import Random

import pytest
from power_loss import Disk, crash_states, record, write_tree

from hpctrain.files import read_json_lines
from hpctrain.records.lease import Lease, newest_lease
from hpctrain.records.run_record import read_run_record
from hpctrain.records.submit_successor import claim_successor, record_successor
from hpctrain.rundir import RunDir

_NO_SLURM = {"PATH": ""}


def acquire(run: RunDir, job_id: str, predecessor: str | None = None, start: int = 0) -> Lease:
    lease = Lease(run, job_id, start, _NO_SLURM, print)
    lease.acquire(predecessor)
    return lease


def hand_over(folder: Path) -> None:
    """Job 7 trains and hands the run over to job 8. Each job records each completed step of this."""
    run = RunDir(folder)
    acquire(run, "7").release()
    run.log_event("started", 0, done=["lease 7"])
    run.log_event("handover", 0, job_id="7")
    assert claim_successor(run, "8", "7") == "8"
    record_successor(run, "8", "7")
    run.log_event("signal", 0, done=["claim"])
    acquire(run, "8", "7")
    run.log_event("started", 1, done=["lease 8"])


def check_state(run: RunDir, done: set[str]) -> None:
    before = list(read_json_lines(run.events))
    assert all(event["time"] > 0 for event in before)
    run.log_event("restart", 1)
    assert [event["kind"] for event in read_json_lines(run.events)] == [
        *(event["kind"] for event in before),
        "restart",
    ]
    assert read_run_record(run).job_id in (None, "7", "8")

    held = newest_lease(run)
    holders = ["8"] if "lease 8" in done else ["7", "8"] if "lease 7" in done else [None, "7", "8"]
    assert (held and held.holder.job_id) in holders, held
    # Slurm requeues the job, because its node has lost power, too.
    job_id = held.holder.job_id if held else "7"
    acquire(run, job_id, start=1).release()
    assert newest_lease(run).holder.job_id == job_id

    claims = [claim_successor(run, job_id, "7") for job_id in ("8", "9", "8")]
    assert claims == ["8", "8", "8"], claims


def check_hand_over(folder: Path, *, at_most: int, drawn: int) -> None:
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    before = Disk(folder)
    calls = record(folder, [(hand_over, (run.path,))])
    count, begun = 0, time.monotonic()
    for tree, newest in crash_states(before, calls, Random(0), at_most=at_most, drawn=drawn):
        count += 1
        write_tree(tree, folder)
        done = set()
        for line in newest["run/events.jsonl"].splitlines():
            done.update(json.loads(line).get("done", []))
        try:
            check_state(run, done)
        except Exception as error:
            raise AssertionError(f"state {count} after {done}: {tree}") from error
    print(f"{count} states of {len(calls)} calls in {time.monotonic() - begun:.0f} s")


@pytest.mark.ranks
@pytest.mark.slow
def test_states_of_a_hand_over(disk_folder):
    check_hand_over(disk_folder, at_most=30, drawn=10)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_all_states_of_a_hand_over(disk_folder):
    check_hand_over(disk_folder, at_most=10_000, drawn=1000)
