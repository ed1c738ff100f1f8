"""The report of a run with many faults, on a real Slurm."""

from __future__ import annotations

import json
import re

import pytest
from helpers.training_runs import LAST_STEP, Run, preempt, submit
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.text import format_duration

LIMIT_S = 150.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def wait_for_new_steps(run: Run, attempt: int) -> None:
    """Wait until an attempt has trained a few steps."""
    run_steps = lambda: [  # noqa: E731
        record["step"] for record in read_json_lines(run.dir.metrics) if record["attempt"] == attempt
    ]
    wait_for(lambda: len(run_steps()) >= 4, LIMIT_S, f"steps of attempt {attempt} of {run.path}")


def test_report_of_two_preemptions_a_crash_and_a_lost_node(slurm, free_nodes, tmp_path):
    shape = ["--nodes", "2", "--gpus-per-node", "1"]
    run = submit(tmp_path / "run", slurm.env, shape, step_s=0.4, slow_attempts=99)
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
    assert shares["communicating"] > 0
    records = list(read_json_lines(run.dir.metrics))
    # A stop before a validation is caught up: that step is logged again, but not trained again.
    resumed = {event["attempt"]: event["step"] for event in events if event["kind"] == "resumed"}
    trained = [record["step"] for record in records if record["step"] > resumed.get(record["attempt"], 0)]
    assert document["lost_steps"] == len(trained) - len(set(trained))
    assert document["lost_steps"] > 0
    assert shares["lost work"] > 0.4 * document["lost_steps"]
    run.hpctrain("report", str(run.path))
    page = run.dir.report.read_text()
    assert all(word in page for word in ("SIGKILL", "SIGTERM", "lost work"))
    # A start on the lost node may fail once more before Slurm marks it down.
    assert re.search(r"Interruptions: \d failures?, 2 stops(, 1 lost job)?\.", page)
    lost = next(row for row in document["ledger"] if row["what"] == "lost work")["us"] / 1e6
    assert f"{format_duration(lost)} of lost work ({document['lost_steps']} steps repeated)" in page
