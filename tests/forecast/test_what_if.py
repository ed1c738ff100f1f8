"""Time that a change would have saved, compared with runs whose times are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers.run_histories import RunHistory, started_run, write_run

from hpctrain.cli.main import cli
from hpctrain.forecast.what_if import what_if
from hpctrain.telemetry.report.run_data import RunContext, read_run_data
from hpctrain.telemetry.summarize_run import summarize_run

SLOW = {"rank": 3, "host": "n7", "ratio": 2.0, "part": "compute", "lasting": True}
#: A step of 0.4 s; typical ranks compute for 0.1 s less.
TIMES = {
    "seconds": {"data": 0.0, "compute": 0.3, "exchange": 0.1},
    "typical": {"data": 0.0, "compute": 0.2, "exchange": 0.2},
}


def found(folder, history: RunHistory, **environment) -> dict[str, float]:
    """Return the seconds saved by each change."""
    run = write_run(folder / "run", history.after(0, "finished", state="COMPLETED"))
    run.environment.write_text(json.dumps(environment) + "\n")
    data = read_run_data(run, RunContext(), now=history.now)
    return {one.change: one.saved_us / 1e6 for one in what_if(data)}


def test_without_stragglers_the_ranks_do_not_wait_between_first_and_last_report(tmp_path):
    history = started_run().steps(1, 100, every=1, spent={"data": 0.0})
    history.after(0, "straggler", **SLOW, **TIMES).steps(101, 200, every=1, spent={"data": 0.0})
    history.after(0, "straggler", **SLOW, **TIMES).steps(201, 300, every=1, spent={"data": 0.0})
    # 0.1 s of 0.4 s, in 100 steps of 1 s.
    assert found(tmp_path, history) == {"without stragglers (rank 3 on n7)": pytest.approx(25)}


def test_spare_node_saves_the_wait_for_a_new_allocation(tmp_path):
    history = started_run()
    for number in range(8):
        first = 1 + 100 * number
        for step in range(first, first + 100, 20):
            history.steps(step, step + 19, every=10).after(0, "checkpoint", step=step + 19, seconds=0.1)
        history.after(0, "failure", rank=0, cause="n1 is lost").after(0, "requeue", by="requeue")
        history.after(3600, "started", nodes=2).after(5, "resumed", step=first + 99)
    history.steps(801, 900, every=10).after(0, "finished", state="COMPLETED")
    run = write_run(tmp_path / "run", history, backend="slurm", nodes=2)
    data = read_run_data(run, RunContext(), now=history.now)
    (saved_s,) = [one.saved_us / 1e6 for one in what_if(data) if one.change == "with one more spare node"]
    # Eight hours of waiting; the simulation requeues at least after every fifth failure, which lost a node.
    assert 600 < saved_s < 8 * 3700


def test_shorter_time_limit_shows_the_wait_of_earlier_runs(tmp_path):
    history = started_run(3600).steps(1, 60, every=10).after(0, "finished", state="COMPLETED")
    run = write_run(tmp_path / "run", history, backend="slurm", nodes=2, time_limit_s=86_400.0)
    data = read_run_data(run, RunContext(), now=history.now)
    own = summarize_run(data)
    earlier = [replace(own, started=own.submitted + wait_s, time_limit_s=900.0) for wait_s in (60, 100, 9000)]
    assert not [one for one in what_if(data, earlier[:2]) if "--time" in one.change]
    (found,) = [one for one in what_if(data, earlier) if "--time" in one.change]
    assert found.change == "--time=00:15:00 instead of 1-00:00:00 (median wait of 3 such runs)"
    assert found.saved_us == 3500e6


def test_damaged_straggler_event_saves_nothing(tmp_path):
    history = (
        started_run().steps(1, 10, every=1).after(0, "straggler", rank=[], seconds={"data": "x"}, typical=3)
    )
    history.steps(11, 20, every=1).after(0, "straggler", attempt=[], nodes="x")
    assert found(tmp_path, history) == {}


def test_rare_saves_in_an_unreliable_run_cost_more_than_optimal_ones(tmp_path):
    history = started_run().steps(1, 1000, every=1)
    history.after(10, "checkpoint", step=1000, seconds=10.0, stall_s=10.0)
    for _ in range(20):
        history.after(0, "failure", rank=0, cause="x").after(0, "started", nodes=2).after(
            0, "resumed", step=1000
        )
    history.steps(1001, 2000, every=1).after(10, "checkpoint", step=2000, seconds=10.0, stall_s=10.0)
    ((change, saved_s),) = found(tmp_path, history).items()
    assert change.endswith("instead of 16 min 40 s")
    # Mean time between interruptions of the run: (86,400 s + 2 · 2020 s) / 21 / 2 = 2153 s. Daly: 197.6 s.
    assert saved_s == pytest.approx(2000 * (10 / 1000 + 1000 / 4306 - 10 / 197.6 - 197.6 / 4306), rel=0.005)


def test_optimal_interval_saves_nothing(tmp_path):
    history = started_run()
    for save in range(3):
        history.steps(200 * save + 1, 200 * save + 200, every=1)
        history.after(0.2, "checkpoint", step=200 * save + 200, seconds=0.2, stall_s=0.2)
    assert found(tmp_path, history) == {}


@pytest.mark.parametrize(
    ("workers", "data_s", "more", "saved_s"),
    [
        (2, 0.4, 8, 40.0),  # four times as many workers load in 0.25 s what the ranks compute in 0.6 s
        (1, 0.9, 4, 75.0),  # loading, 0.25 s, takes longer than computing, 0.1 s
        (0, 0.4, 2, 40.0),  # loading overlaps with computing
        (0, 0.8, 2, 60.0),
    ],
)
def test_more_data_workers_load_faster(tmp_path, workers, data_s, more, saved_s):
    history = started_run().steps(1, 101, every=1, spent={"data": data_s})
    environment = {"cpus_per_rank": 8, "settings": {"num_workers": workers}}
    change = f"{more} data workers per rank instead of {workers}"
    assert found(tmp_path, history, **environment) == {change: pytest.approx(saved_s)}


def test_report_shows_the_savings(tmp_path):
    history = started_run().steps(1, 101, every=1, spent={"data": 0.4})
    found(tmp_path, history, cpus_per_rank=8, settings={"num_workers": 2})
    (tmp_path / "run" / "spec.yaml").write_text("{}")
    for form, text in (
        ("json", '"what_if": [\n    {\n      "change": "8 data workers per rank instead of 2"'),
        ("md", "| 8 data workers per rank instead of 2 | 40.0 s |"),
        ("html", "8 data workers per rank instead of 2: −40.0 s"),
    ):
        result = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--format", form, "-o", "-"])
        assert text in result.stdout, result.output


def test_run_without_steps_has_no_savings(tmp_path):
    assert found(tmp_path, started_run().after(100, "checkpoint", step=None)) == {}
