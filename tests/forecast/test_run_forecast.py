"""Predictions of runs, from earlier runs with known times."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace

import pytest
from click.testing import CliRunner
from helpers.run_histories import START, disturbed_run, started_run, write_run

from hpctrain.cli.main import cli
from hpctrain.forecast.run_forecast import (
    RunForecast,
    RunForecaster,
    TimeDistribution,
    comparable_outcomes,
    expected_steps,
)
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.telemetry.report.run_data import RunContext, read_run_data
from hpctrain.telemetry.run_outcome import RunOutcome, kind_of, read_outcomes
from hpctrain.telemetry.summarize_run import summarize_run

OUTCOME = RunOutcome(
    run_id="r",
    kind=["slurm", "script", "/a.py", 2, 8, 8, None],
    hparams={"max_steps": 1000, "lr": 0.1},
    state="COMPLETED",
    submitted=START,
    started=START + 60,
    ended=START + 1190,
    nodes=2,
    gpus=16,
    steps=1000,
    train_s=1000.0,
    start_s=100.0,
    close_s=30.0,
    allocated_s=1130.0,
    failures=0,
    stops=0,
    restart_s=None,
    requeue_s=None,
    save_every_s=100.0,
    ettr=0.84,
)
SPEC = JobSpec(
    script="/a.py",
    name="a",
    run_id="a",
    run_dir="/runs/a",
    backend="slurm",
    python="python",
    workdir="/",
    nodes=2,
    gpus_per_node=8,
    args=("--max-steps", "1000", "--lr", "0.1"),
)


def predicted(*outcomes: RunOutcome, spec: JobSpec = SPEC, **queue) -> RunForecast:
    found = RunForecaster(spec, outcomes).forecast(START, **queue)
    assert found is not None
    return found


def test_run_like_earlier_ones_takes_as_long():
    found = predicted(*[OUTCOME] * 10)
    assert found.start[0] < START + 60 < found.start[-1]
    assert found.end[0] < START + 1190 < found.end[-1]
    assert found.end[-1] - found.end[0] < 600
    assert found.ettr[0] < 0.84 < found.ettr[-1]
    assert found.gpu_hours[0] < 16 * 1130 / 3600 < found.gpu_hours[-1]
    assert (found.kwh, found.cost) == (None, None)


def test_length_of_the_training_is_proportional_to_the_argument():
    longer = replace(SPEC, args=("--max-steps", "4000", "--lr", "0.1"))
    found = predicted(*[OUTCOME] * 10, spec=longer)
    assert found.end[2] - START == pytest.approx(60 + 100 + 4000 + 30, rel=0.1)


def test_interruptions_lengthen_the_range():
    killed = replace(OUTCOME, failures=3, restart_s=200.0)
    calm, disturbed = predicted(*[OUTCOME] * 10), predicted(*[killed] * 10)
    assert disturbed.end[2] > calm.end[2] + 400
    assert disturbed.ettr[2] < calm.ettr[2]


def test_start_of_slurm_and_waits_of_other_jobs_are_in_the_range():
    found = predicted(OUTCOME, start_s=7200.0, waits_s=[600.0] * 20)
    assert found.start[0] < START + 700
    assert found.start[-1] == START + 7200


def test_price_and_energy_follow_the_time():
    found = predicted(*[replace(OUTCOME, kwh=2.0)] * 5, price=2.5, currency="EUR")
    assert found.cost == pytest.approx([2.5 * hours for hours in found.gpu_hours], abs=0.01)
    assert found.kwh[0] < 2.0 < found.kwh[-1]
    assert "EUR" in str(found)
    assert RunForecast.from_record(json.loads(json.dumps(found.record()))) == found


@pytest.mark.parametrize(
    ("args", "steps"),
    [
        ({"max_steps": 1000, "lr": 0.1}, 1000),
        ({"max_steps": 500, "lr": 0.1}, 500),
        ({"max_steps": 500, "lr": 0.7}, 500),
        ({"lr": 0.7}, None),
    ],
)
def test_expected_steps(args, steps):
    assert expected_steps(args, [OUTCOME]) == steps


def test_unknown_length_has_no_forecast():
    assert RunForecaster(replace(SPEC, args=()), [OUTCOME]).forecast(START) is None
    failed = replace(OUTCOME, state="FAILED")
    assert RunForecaster(SPEC, [failed]).forecast(START) is None


def test_other_learning_rates_are_used_only_without_enough_equal_ones():
    other = replace(OUTCOME, hparams={"max_steps": 1000, "lr": 0.9})
    assert comparable_outcomes(OUTCOME.hparams, [other, OUTCOME]) == [other, OUTCOME]
    assert comparable_outcomes(OUTCOME.hparams, [other, *[OUTCOME] * 3]) == [OUTCOME] * 3


def test_range_of_the_time_contains_nine_tenths_of_later_times():
    source, inside = random.Random(1), 0
    for _ in range(300):
        spread = source.uniform(0.05, 0.3)
        *known, actual = (100 * source.lognormvariate(0, spread) for _ in range(6))
        times = TimeDistribution(known)
        drawn = sorted(times.time_s(times.draw_deviation(source)) for _ in range(200))
        inside += drawn[10] <= actual <= drawn[189]
    assert 0.82 < inside / 300 < 0.97


def test_outcome_of_a_disturbed_run(tmp_path):
    run = write_run(
        tmp_path / "r", disturbed_run(), backend="slurm", nodes=2, gpus_per_node=2, time_limit_s=60.0
    )
    found = summarize_run(read_run_data(run, RunContext(), now=START))
    assert (found.state, found.steps, found.nodes, found.gpus, found.time_limit_s) == (
        "COMPLETED",
        300,
        2,
        4,
        60.0,
    )
    assert (found.wait_s, found.failures, found.stops) == (40, 2, 1)
    assert (found.restart_s, found.requeue_s) == (pytest.approx(6.6), pytest.approx((127 + 96) / 2))


def test_unended_and_resubmitted_runs_have_no_outcome(tmp_path):
    for name, history in {
        "active": started_run(5).steps(1, 3, every=1),
        "again": disturbed_run()
        .after(5, "submitted", job_id="8", backend="slurm")
        .after(1, "started", nodes=2),
    }.items():
        run = write_run(tmp_path / name, history, backend="slurm")
        assert summarize_run(read_run_data(run, RunContext(), now=START)) is None


def test_damaged_outcomes_are_skipped(tmp_path):
    for name, text in {
        "ok": json.dumps(asdict(OUTCOME) | {"added later": 1}),
        "cut": json.dumps(asdict(OUTCOME))[:50],
        "old": "{}",
        "odd": json.dumps(asdict(OUTCOME) | {"train_s": "x"}),
        "list": "[]",
    }.items():
        (tmp_path / name).mkdir()
        RunDir(tmp_path / name).outcome.write_text(text)
    assert read_outcomes(tmp_path, OUTCOME.kind) == [OUTCOME]
    assert read_outcomes(tmp_path, ["other"]) == []
    assert read_outcomes(tmp_path / "missing") == []


@pytest.mark.parametrize(
    "record", [None, [], {"runs": 1}, {"runs": 1, "start": [1], "end": [1] * 5, "ettr": [1] * 5}]
)
def test_damaged_forecast_is_ignored(record):
    assert RunForecast.from_record(record) is None


def test_submission_shows_and_records_the_forecast(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("print('hello')\n")
    words = ["submit", "--backend", "local", "--ntasks-per-node", "1", "--runs-dir", "runs"]
    kind = kind_of(
        vars(replace(SPEC, backend="local", script=str(script), nodes=1, gpus_per_node=0, ntasks_per_node=1))
    )
    for number in range(3):
        run = RunDir(tmp_path / "runs" / f"r{number}")
        run.path.mkdir(parents=True)
        run.outcome.write_text(json.dumps(asdict(replace(OUTCOME, kind=kind, gpus=0))))
    shown = CliRunner().invoke(cli, [*words, "--dry-run", str(script), "--max-steps", "1000", "--lr", "0.1"])
    assert "Forecast from 3 earlier runs: start " in shown.stderr
    nothing = CliRunner().invoke(cli, [*words, "--dry-run", str(script), "--other", "1"])
    assert nothing.exit_code == 0
    assert "Forecast" not in nothing.stderr


def test_energy_of_a_run_is_divided_by_samples_and_lost_work(tmp_path):
    history = started_run(0).steps(1, 100, every=1)
    history.after(0, "failure", rank=0, cause="x").after(0, "restart").after(0, "started", nodes=2)
    history.after(0, "resumed", step=50).steps(51, 150, every=1).after(0, "finished", state="COMPLETED")
    run = write_run(tmp_path / "r", history, backend="slurm", nodes=2)
    run.environment.write_text(json.dumps({"settings": {"global_batch_size": 10}}) + "\n")
    run.telemetry(0).parent.mkdir()
    lines = [
        {
            "time": START + second,
            "host": "n1",
            "seconds": 5.0,
            "energy_j": 1000.0,
            "gpu_energy_j": [2000.0, None],
        }
        for second in range(5, 201, 5)
    ]
    run.telemetry(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    energy = read_run_data(run, RunContext(), now=START).energy
    assert energy.total_kwh == pytest.approx(40 * 3000 / 3.6e6)
    # 50 of 200 s were repeated.
    assert energy.lost_kwh == pytest.approx(energy.total_kwh / 4, rel=0.05)
    assert energy.per_sample_kwh == pytest.approx(energy.total_kwh / 1500)
