"""Recommendations of the report: given only with measured evidence."""

import json
import math
from pathlib import Path

import pytest
from helpers.run_histories import START, STRAGGLER, RunHistory, started_run, write_run
from test_report_page import facts_of

from hpctrain.cli.report import json_report
from hpctrain.files import append_json_line
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.advice import Advice, advise
from hpctrain.telemetry.report.pages import render_run_page
from hpctrain.telemetry.report.summary import key_figures, summarize


def node_lines(run: RunDir, node: int, host: str, seconds: int = 100, **values: object) -> None:
    hardware = {"cpus": 64, "gpu_names": ["H100"] * 2, "gpu_memory_total": [80 * 10**9] * 2}
    for index, line in enumerate([hardware, *[values] * (seconds // 5)]):
        append_json_line(run.telemetry(node), {"time": START + 5 * index, "host": host, **line})


def environment(run: RunDir, cpus: int = 16, **settings: object) -> None:
    run.environment.write_text(json.dumps({"cpus_per_rank": cpus, "settings": settings}) + "\n")


def advice_in_all_reports(run: RunDir) -> list[Advice]:
    facts = facts_of(run)
    advice = advise(facts)
    assert json_report(facts)["advice"] == [{"what": item.what, "evidence": item.evidence} for item in advice]
    assert ('id="advice"' in render_run_page(facts)) == bool(advice)
    return advice


def test_no_advice_without_evidence(tmp_path):
    assert advice_in_all_reports(write_run(tmp_path / "run", started_run(0).steps(1, 100, every=1))) == []
    assert advice_in_all_reports(write_run(tmp_path / "empty", RunHistory())) == []
    history = started_run(0).steps(1, 100, every=1, spent={"all": 1.0, "data": 0.01})
    run = write_run(tmp_path / "healthy", history)
    environment(run, num_workers=2, micro_batch_size=None, checkpoint_every="auto")
    for node, host in enumerate(("n1", "n2")):
        node_lines(run, node, host, gpu_util=[95, 96], gpu_clock_mhz=[1600, 1610 - node], cpu=20.0)
    # Clocks of idle GPUs do not count.
    node_lines(run, 2, "n3", gpu_util=[0, 0], gpu_clock_mhz=[300, 300])
    assert advice_in_all_reports(run) == []


@pytest.mark.parametrize(
    ("cpus", "workers", "cpu_percent", "backend", "message"),
    [
        (4, 0, 10.0, "slurm", "num_workers=2"),
        (3, 2, 10.0, "slurm", "num_workers=3"),
        (2, 2, 10.0, "slurm", "more CPUs per rank (--cpus-per-task), and increase num_workers from 2"),
        (64, 8, 10.0, "slurm", "num_workers=16"),
        (64, 2, 95.0, "slurm", "more CPUs per rank (--cpus-per-task), or do less"),
        (2, 2, 95.0, "local", "Do less work per sample."),
    ],
)
def test_waiting_for_data_gives_advice(tmp_path, cpus, workers, cpu_percent, backend, message):
    history = started_run(0).steps(1, 100, every=1, spent={"all": 1.0, "data": 0.4})
    run = write_run(tmp_path / "run", history, backend=backend)
    environment(run, cpus, num_workers=workers)
    node_lines(run, 0, "n1", gpu_util=[60, 60], cpu=cpu_percent)
    (advice,) = advice_in_all_reports(run)
    assert message in advice.what
    assert advice.evidence.startswith(
        "The ranks spent 40.0% of their step time waiting for data; the GPUs were idle 40% of the time; "
        f"the CPU utilization of the nodes was {cpu_percent:.0f}%; "
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "Lower the learning rate, or clip gradients."),
        ({"gradient_clip_norm": None}, "or clip gradients with Trainer(gradient_clip_norm=1.0)."),
        ({"gradient_clip_norm": 1.0}, "Lower the learning rate."),
    ],
)
def test_non_finite_loss_gives_advice(tmp_path, settings, message):
    history = started_run(0).steps(1, 9, every=1).steps(10, 30, every=1, loss=math.nan)
    run = write_run(tmp_path / "run", history)
    if settings is not None:
        environment(run, **settings)
    (advice,) = advice_in_all_reports(run)
    assert advice.what.endswith(message)
    assert advice.evidence == "The loss is NaN or infinite in 21 steps, starting at step 10."
    facts = facts_of(run)
    assert ("Loss", "NaN", "since step 10; lowest 0.11111 at step 9") in key_figures(facts)
    assert "The loss has been NaN since step 10." in " ".join(summarize(facts))
    assert json_report(facts)["loss_is_no_number_since"] == 10


def test_node_with_lower_clocks_gives_advice(tmp_path):
    run = write_run(tmp_path / "run", started_run(0).steps(1, 100, every=1))
    for node in range(3):
        slow = {"gpu_clock_mhz": [1230, 1230], "gpu_throttled": [["temperature"], []]}
        fast = {"gpu_clock_mhz": [1600, 1600], "gpu_throttled": [["power cap"], ["power cap"]]}
        node_lines(run, node, f"n{node}", gpu_util=[99, 99], **(slow if node == 1 else fast))
    (advice,) = advice_in_all_reports(run)
    assert advice.what == "n1 is slow and delays all other nodes. Exclude it with --exclude n1."
    assert "1230 MHz, but those of other nodes at 1600 MHz (1.3 times as fast)" in advice.evidence
    assert "lowered: temperature (100.0% of the time)" in advice.evidence


@pytest.mark.parametrize(
    ("nodes", "backend", "advice"),
    [
        (2, "slurm", "n7 is slow and delays all other nodes. Exclude it with --exclude n7."),
        (1, "slurm", "A rank is slow and delays all other ranks. Find the cause with `hpctrain profile`."),
        (2, "local", "A rank is slow and delays all other ranks. Find the cause with `hpctrain profile`."),
    ],
)
def test_lasting_straggler_gives_advice(tmp_path, nodes, backend, advice):
    history = RunHistory().after(0, "submitted", job_id="7", backend=backend).after(0, "started", nodes=nodes)
    history.steps(1, 50, every=1).after(0, "straggler", **STRAGGLER)
    history.after(0, "straggler", **STRAGGLER | {"lasting": False, "host": "n8"})
    evidence = (
        "Rank 3 on n7 takes 1.4 times as long as other ranks (computing: 210 ms per step, "
        "other ranks 150 ms)."
    )
    run = write_run(tmp_path / "run", history, backend=backend)
    assert advice_in_all_reports(run) == [Advice(advice, evidence)]


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_driver_and_memory_errors_give_advice(tmp_path, backend):
    run = write_run(tmp_path / "run", started_run(0).steps(1, 5, every=1), backend=backend)
    node_lines(run, 0, "n1", seconds=5, gpu_xids=[[79], [31]], gpu_ecc_errors=[0, 3])
    (advice,) = advice_in_all_reports(run)
    assert ("--exclude n1" in advice.what) == (backend == "slurm")
    assert advice.evidence == "The driver reported Xid 31, Xid 79; 3 uncorrected memory errors."


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"checkpoint_async": False}, "checkpoint_async=True"),
        ({"checkpoint_every": "auto"}, "local_checkpoints"),
        ({"checkpoint_every": 10}, "checkpoint_every='auto'"),
        ({"checkpoint_every": "auto", "local_checkpoints": "/tmp"}, None),
        (None, "async_save()"),
    ],
)
def test_blocking_saves_give_advice(tmp_path, settings, message):
    history = started_run(0)
    for first in (1, 11, 21):
        history.steps(first, first + 9, every=1)
        history.after(2, "checkpoint", step=first + 9, seconds=2.0, stall_s=2.0)
    run = write_run(tmp_path / "run", history.steps(31, 40, every=1))
    if settings is not None:  # otherwise a script without the Trainer
        environment(run, **settings)
    advice = advice_in_all_reports(run)
    assert len(advice) == (message is not None)
    for recommendation in advice:
        assert message in recommendation.what
        assert "3 saves paused training for 6.0 s" in recommendation.evidence


@pytest.fixture
def run_from_zero(tmp_path: Path) -> RunDir:
    """A run without the Trainer that was restarted without a checkpoint."""
    history = started_run(0).steps(1, 40, every=1).after(0, "failure", rank=0, cause="SIGKILL")
    history.after(0, "restart").after(1, "started", starts_over=True).steps(1, 60, every=1)
    return write_run(tmp_path / "run", history)


def test_lost_work_gives_advice(run_from_zero):
    environment(run_from_zero, checkpoint_every=100)
    (advice,) = advice_in_all_reports(run_from_zero)
    assert "Trainer(checkpoint_every='auto')" in advice.what
    message = "% of the work was lost in 1 interruption; checkpoints were saved every 100 steps."
    assert message in advice.evidence
    environment(run_from_zero, checkpoint_every="auto")
    assert advice_in_all_reports(run_from_zero) == []


def test_script_that_saves_nothing_gets_advice(run_from_zero):
    (advice,) = advice_in_all_reports(run_from_zero)
    assert "Save checkpoints in $HPCTRAIN_RUN_DIR/checkpoints" in advice.what
    assert advice.evidence == (
        "This script saved no checkpoint there, so every restart starts over, unless it loads a checkpoint "
        "from elsewhere (1 restart so far)."
    )
    run_from_zero.log_event("checkpoint", 1, step=None, path="last.ckpt")
    (advice,) = advice_in_all_reports(run_from_zero)
    assert advice.what == "Save checkpoints more often."
