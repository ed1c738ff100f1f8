"""What to request next time: from the time, memory, CPUs and GPUs that a completed run used."""

from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner
from helpers.run_histories import RunHistory, disturbed_run, started_run, write_run
from test_advice import node_lines
from test_report_page import facts_of

from hpctrain.cli.main import cli
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.json_report import json_report
from hpctrain.telemetry.report.markdown_report import markdown_report
from hpctrain.telemetry.report.next_request import next_request
from hpctrain.telemetry.report.run_page import render_run_page

SPEC = {
    "time_limit_s": 7200.0,
    "stop_before_limit_s": 120,
    "cpus_per_task": 16,
    "ntasks_per_node": 2,
    "gpus_per_node": 2,
    "directives": {"mem": "256G"},
}


def completed(seconds: int = 600) -> RunHistory:
    """Return a run that waited for a minute, and then trained for `seconds`."""
    history = started_run(60).steps(1, seconds, every=1, spent={"data": 0.0})
    return history.after(0, "finished", state="COMPLETED", exit_code=0, cause=None)


def measured(folder, history: RunHistory | None = None, gpu_util=(95, 90), **spec) -> RunDir:
    run = write_run(folder / "run", history or completed(), **{**SPEC, **spec})
    node_lines(run, 0, "n1", 400, cpu=10.0, memory=40 * 2**30, gpu_util=list(gpu_util))
    return run


def found(run: RunDir) -> dict[str, tuple[str, str, str]]:
    return {one.option: (one.requested, one.used, one.next) for one in next_request(facts_of(run))}


def test_smaller_request_has_a_margin_over_what_was_used(tmp_path):
    # 600 s · 1.25 + 120 s to save, in units of five minutes; 40 GiB · 1.25; 9.8% of 64 CPUs · 1.25, two ranks
    assert found(measured(tmp_path)) == {
        "--time": ("02:00:00", "10 min", "00:15:00"),
        "--mem": ("256G", "40 GiB", "50G"),
        "--cpus-per-task": ("16", "3.1 busy per rank", "4"),
    }


def test_fitting_request_is_left_unchanged(tmp_path):
    spec = {"time_limit_s": 1000.0, "cpus_per_task": 4, "directives": {"mem": "56G"}}
    assert found(measured(tmp_path, **spec)) == {}


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        ({"time_limit_s": None}, "--time"),
        ({"directives": {"mem": "0"}}, "--mem"),
        ({"directives": {"mem-per-cpu": "64G"}}, "--mem"),
        ({"cpus_per_task": None}, "--cpus-per-task"),
    ],
)
def test_resource_that_was_not_requested_is_not_advised(tmp_path, change, absent):
    assert absent not in found(measured(tmp_path, **change))


def test_time_limit_that_needed_several_jobs_is_too_short(tmp_path):
    run = write_run(tmp_path / "run", disturbed_run(), **{**SPEC, "time_limit_s": 100.0})
    requested, _, later = found(run)["--time"]
    assert (requested, later) == ("00:01:40", "00:10:00")


def test_longer_time_limit_stays_within_the_maximum_of_the_partition(tmp_path):
    history = disturbed_run()
    history.events[0]["max_time_s"] = 400.0
    run = write_run(tmp_path / "run", history, **{**SPEC, "time_limit_s": 100.0})
    assert found(run)["--time"][2] == "00:06:40"
    run = write_run(tmp_path / "run", history, **{**SPEC, "time_limit_s": 400.0})
    assert "--time" not in found(run)


def test_idle_gpus_are_not_requested_again(tmp_path):
    assert found(measured(tmp_path, gpu_util=[80, 0]))["--gpus-per-node"] == ("2", "1 busy", "1")


def test_run_that_waits_for_data_or_ran_out_of_memory_keeps_its_cpus_or_memory(tmp_path):
    waits = started_run(60).steps(1, 600, every=1, spent={"data": 0.3})
    waits.after(0, "finished", state="COMPLETED")
    assert "--cpus-per-task" not in found(measured(tmp_path / "waits", waits))
    small = started_run(60).after(9, "failure", **{"class": "oom"}).after(9, "started", nodes=1)
    small.steps(1, 600, every=1).after(0, "finished", state="COMPLETED")
    assert "--mem" not in found(measured(tmp_path / "small", small))


def test_failed_run_gives_no_advice(tmp_path):
    history = started_run(60).steps(1, 600, every=1).after(0, "finished", state="FAILED", cause="x")
    assert found(measured(tmp_path, history)) == {}


def test_reports_and_status_show_the_request(tmp_path):
    run = measured(tmp_path)
    facts = facts_of(run)
    assert json_report(facts)["next_request"] == [dataclasses.asdict(one) for one in next_request(facts)]
    assert "| \\-\\-mem | 256G | 40 GiB | 50G |".replace("\\-", "-") in markdown_report(facts)
    assert "<td>256G</td><td>40 GiB</td><td>50G</td>" in render_run_page(facts)
    shown = CliRunner().invoke(cli, ["status", str(run.path)]).stdout
    assert "next time   --time=00:15:00 (used 10 min of 02:00:00)  --mem=50G (used 40 GiB of 256G)" in shown


def test_run_on_this_machine_reserves_nothing(tmp_path):
    assert found(measured(tmp_path, backend="local")) == {}
