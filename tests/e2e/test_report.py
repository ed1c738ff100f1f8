"""The report of a run with many faults, on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise

import pytest
from helpers import SCRIPTS
from helpers.processes import run_processes
from helpers.training_runs import LAST_STEP, Run, preempt
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.text import format_duration

LIMIT_S = 150.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture
def restart_nodes(slurm):
    """Restart killed nodes after the test."""
    yield
    for node, state in slurm.node_states().items():
        if "down" in state:
            slurm.start_node(node)


def wait_for_new_steps(run: Run, attempt: int) -> None:
    """Wait until an attempt has trained a few steps."""
    run_steps = lambda: [  # noqa: E731
        record["step"] for record in read_json_lines(run.dir.metrics) if record["attempt"] == attempt
    ]
    wait_for(lambda: len(run_steps()) >= 4, LIMIT_S, f"steps of attempt {attempt} of {run.path}")


def expected_shares(events: list[dict]) -> dict[str, float]:
    """Return the seconds between the events that begin and end a share."""
    shares = {"queued": 0.0, "restarting": 0.0, "loading": 0.0}
    transitions = [
        event for event in events if event["kind"] not in ("startup", "checkpoint", "straggler", "seen")
    ]
    for event, successor in pairwise(transitions):
        seconds = successor["time"] - event["time"]
        if event["kind"] == "resumed":
            shares["loading"] += event["seconds"]
        elif successor["kind"] == "started" and event["kind"] in ("submitted", "requeue"):
            shares["queued"] += seconds
        elif event["kind"] in ("failure", "signal", "restart", "shrink", "replace", "excluded"):
            shares["restarting"] += seconds
    return shares


def test_report_of_two_preemptions_a_crash_and_a_lost_node(slurm, restart_nodes, tmp_path):
    run = Run(tmp_path / "run", slurm.env)
    script = str(SCRIPTS / "train_slowly.py")
    shape = ["--nodes", "2", "--gpus-per-node", "1"]
    run.hpctrain("submit", *shape, "--run-dir", str(run.path), script, "0.4")
    wait_for_new_steps(run, 0)
    run.kill_rank(1)
    for attempt in (1, 2):
        wait_for_new_steps(run, attempt)
        preempt(slurm.env)
        # If Slurm also stops the batch host, it requeues by itself, without an event.
        wait_for(lambda n=attempt: len(run.events("signal")) == n, LIMIT_S, f"stop {attempt}")
        wait_for(lambda: run.status()["state"] != "COMPLETING", LIMIT_S, "the job to leave")
        wait_for(
            lambda n=attempt: run.status() and len(run.events("started")) == n + 2, LIMIT_S, "another start"
        )
    wait_for_new_steps(run, 3)
    slurm.kill_node(run.events("started")[-1]["hosts"][1])
    assert run.wait() == 0

    document = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    assert (document["state"], document["step"]) == ("COMPLETED", LAST_STEP)
    ends = [attempt["end"] for attempt in document["attempts"]]
    assert ends[:3] == ["failure", "stop", "stop"]
    assert ends[3] in ("failure", "stop", "vanished")
    assert ends[-1] == "completed"
    shares = {row["what"]: (row["us"] or 0) / 1e6 for row in document["ledger"]}
    events = list(run.dir.read_events())
    assert sum(row["us"] or 0 for row in document["ledger"]) == document["wall_us"]
    assert document["wall_us"] / 1e6 == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.001)
    expected = expected_shares(events)
    if ends[3] != "vanished":  # A job that is killed without notice has no event with the time.
        assert shares["queued"] == pytest.approx(expected["queued"], abs=1)
        assert shares["restarting"] == pytest.approx(expected["restarting"], abs=1)
    assert shares["loading"] == pytest.approx(expected["loading"], abs=1)
    assert shares["communicating"] > 0
    records = list(read_json_lines(run.dir.metrics))
    # A stop before a validation is caught up: that step is logged again, but not trained again.
    resumed = {event["attempt"]: event["step"] for event in events if event["kind"] == "resumed"}
    trained = [record["step"] for record in records if record["step"] > resumed.get(record["attempt"], 0)]
    assert document["lost_steps"] == len(trained) - len(set(trained))
    assert document["lost_steps"] > 0
    assert shares["lost work"] > 0.4 * document["lost_steps"]
    assert document["again"][-1].endswith(f"{script} 0.4")
    run.hpctrain("report", str(run.path))
    page = run.dir.report.read_text()
    assert all(word in page for word in ("SIGKILL", "SIGTERM", "lost work"))
    # A start on the lost node may fail once more before Slurm marks it down.
    assert re.search(r"Interruptions: \d failures?, 2 stops(, 1 lost job)?\.", page)
    lost = next(row for row in document["ledger"] if row["what"] == "lost work")["us"] / 1e6
    assert f"{format_duration(lost)} of lost work ({document['lost_steps']} steps repeated)" in page


def test_report_of_a_cancelled_run_without_a_recorded_end(slurm, tmp_path):
    """The supervisor is stopped, as on an overloaded machine, until Slurm kills it."""
    run = Run(tmp_path / "run", slurm.env)
    sleep_script, empty_script = tmp_path / "sleeps.py", tmp_path / "ends.py"
    sleep_script.write_text("import time\ntime.sleep(120)\n")
    empty_script.write_text("")
    submit = ("submit", "--nodes", "1", "--ntasks-per-node", "1", "--run-dir", str(run.path))
    run.hpctrain(*submit, str(sleep_script))
    wait_for(lambda: run.dir.attempts() and run.ranks(), LIMIT_S, "the rank")
    for process in run_processes(run.path):
        if "hpctrain.supervisor" in process.argv:
            os.kill(process.pid, signal.SIGSTOP)
    run.hpctrain("cancel", str(run.path))
    wait_for(lambda: run.status()["state"] == "CANCELLED", LIMIT_S, "the end of the job", interval=1)
    assert run.events("finished") == []
    assert run.events("seen")[-1]["job_state"].startswith("CANCELLED")
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    assert [attempt["end"] for attempt in report["attempts"]] == ["cancelled"]
    run.hpctrain(*submit, str(empty_script))
    assert run.wait() == 0
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    attempt_ends = [(attempt["end"], attempt["followed_by"]) for attempt in report["attempts"]]
    assert attempt_ends == [("cancelled", "submission"), ("completed", None)]
    page = run.hpctrain("report", str(run.path), "-o", "-").stdout
    assert "The run was cancelled and resubmitted once." in page
    assert "lost job" not in page
