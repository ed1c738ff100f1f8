import json
import math

import pytest
from helpers.run_histories import START, STRAGGLER, RunHistory, started_run
from rich.cells import cell_len

from hpctrain.cli.top import format_overview
from hpctrain.record_types import NodeSample, StepRecord, to_record
from hpctrain.telemetry.live.top_view import TopSnapshot, TopView, cut_line, format_view


def snapshot_of(
    history: RunHistory, state: str = "RUNNING", lines: list[dict] | None = None, log: list[str] | None = None
) -> TopSnapshot:
    live = TopView()
    # In two parts, as a run writes them.
    for part in (slice(None, 5), slice(5, None)):
        live.add_records(history.events[part], history.metrics[part])
    samples = [to_record({"time": 1.0, **line}, NodeSample) for line in lines or []]
    return live.snapshot("digits", state, "", samples, log=log or [])


def text_of(snapshot: TopSnapshot, width: int = 100, height: int = 30) -> str:
    return "\n".join(line for _, line in format_view(snapshot, width, height))


def test_time_left_uses_the_speed_of_the_last_minute():
    history = started_run(0).steps(1, 100, every=5, last_step=400).steps(101, 200, every=2)
    snapshot = snapshot_of(history)
    assert (snapshot.step, snapshot.last_step, snapshot.loss) == (200, 400, 1 / 200)
    assert snapshot.steps_per_s == pytest.approx(0.5)
    assert snapshot.left_s == pytest.approx(400)
    assert "200 of 400" in text_of(snapshot)
    assert "6 min 40 s left" in text_of(snapshot)


def test_non_finite_loss_is_shown():
    history = started_run(0).steps(1, 9, every=1).steps(10, 12, every=1, loss=math.nan)
    snapshot = snapshot_of(history)
    assert "loss   NaN or infinite since step 10; last finite loss 0.11111" in text_of(snapshot)
    assert snapshot_of(history.steps(13, 13, every=1)).no_number_since is None


def test_losses_of_lost_steps_are_forgotten():
    history = started_run(0).steps(1, 100, every=1).after(30, "started").steps(51, 60, every=1, loss=7.0)
    snapshot = snapshot_of(history)
    assert (snapshot.step, snapshot.loss, len(snapshot.losses)) == (60, 7.0, 60)


@pytest.mark.slow
def test_million_records_keep_the_newest_losses():
    live = TopView()
    # Dropping old losses one by one from a plain dict would take minutes.
    live.add_records([], (StepRecord(n, START + n, metrics={"loss": 1.0 * n}) for n in range(10**6)))
    snapshot = live.snapshot("digits", "RUNNING", "", [])
    assert snapshot.losses == [float(step) for step in range(10**6 - 20_000, 10**6)]
    assert snapshot.steps_per_s == pytest.approx(1)


def test_failures_and_stops_are_counted_without_failed_saves():
    history = (
        started_run(0).after(0, "failure", cause="disk full").after(0, "failure", rank=1, cause="SIGKILL")
    )
    history.after(0, "started").after(0, "signal", signal="SIGTERM", step=3)
    snapshot = snapshot_of(history)
    assert (snapshot.failures, snapshot.stops, snapshot.attempt) == (1, 1, 1)
    assert "attempt 1, 1 failure, 1 stop" in text_of(snapshot)


def test_gpus_are_shown_as_bars_per_node():
    lines = [
        {"host": "n1", "gpu_util": [100.0, 0.0, None], "gpu_memory": [2**30, 2**31, None]},
        {"host": "n2", "gpu_util": [None]},
        {"host": "n3"},
    ]
    text = text_of(snapshot_of(started_run(0).steps(1, 2, every=1), lines=lines))
    assert "n1  █▁    50%  3 GiB" in text
    assert "n2       –%" in text
    assert "n3" not in text


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 24])
def test_no_line_is_wider_than_the_terminal(width, height):
    history = started_run(0).after(0, "failure", rank=0, cause="because " * 50).after(0, "started")
    history.steps(1, 500, every=1, last_step=123456)
    # Some characters are two columns wide.
    history.after(0, "failure", rank=1, cause="訓練中斷了" * 30)
    lines = [{"host": "節點" * 40, "gpu_util": [50] * 64, "gpu_memory": [10] * 64}] * 40
    lines_ = format_view(snapshot_of(history, lines=lines), width, height)
    assert max(cell_len(line) for _, line in lines_) <= max(width, 20)
    assert len(lines_) < height + 12


def test_terminal_escapes_are_removed():
    history = started_run(0).after(0, "failure", rank=0, cause="\x1b]0;title\x07\x1b[2J\n\rnew line")
    text = text_of(snapshot_of(history, lines=[{"host": "\x1b[31m", "gpu_util": [1]}]))
    assert "\x1b" not in text
    assert "\r" not in text


def test_document_contains_the_fields_of_each_event():
    history = started_run(0).after(1, "checkpoint", step=5).after(1, "checkpoint", step=9, tier="local")
    newest, *_ = json.loads(json.dumps(snapshot_of(history).document()))["events"]
    assert newest == {**newest, "kind": "checkpoint", "step": 9, "tier": "local", "count": 2}


def test_consecutive_checkpoints_are_one_line():
    history = started_run(0).steps(1, 5, every=1)
    for step in range(10, 610, 10):
        history.after(1, "checkpoint", step=step, tier="local")
        history.after(1, "checkpoint", step=step, tier="shared")
    lines = text_of(snapshot_of(history)).splitlines()
    assert [line.split("  ", 1)[1] for line in lines if "checkpoint" in line] == [
        "checkpoint  step 600, latest of 60"
    ]
    assert "started" in lines[-2]
    history.after(1, "restart", cause="SIGKILL").after(1, "checkpoint", step=610)
    assert sum("checkpoint" in line for line in text_of(snapshot_of(history)).splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "fields", "line"),
    [
        ("chaos", {"fault": "kill-rank", "ranks": [3], "host": "n2"}, "chaos  ranks 3 on n2, kill-rank"),
        ("chaos", {"fault": "preempt", "ranks": [], "host": None}, "chaos  preempt"),
        ("requeue", {"by": "successor", "class": "time-limit"}, "requeue  time-limit, successor"),
        ("signal", {"signal": "SIGTERM", "step": 30, "saved": True}, "signal  step 30, saved, SIGTERM"),
        ("seen", {"job_id": "25", "job_state": "CANCELLED by 1000"}, "seen  job 25, CANCELLED by 1000"),
        ("finished", {"state": "CANCELLED", "cause": None}, "finished  CANCELLED"),
        ("failure", {"rank": 3, "host": "n2", "cause": "SIGKILL"}, "failure  SIGKILL"),
        ("excluded", {"hosts": ["n1", "n2"]}, "excluded  n1, n2"),
    ],
)
def test_event_is_shown_with_its_details(kind, fields, line):
    shown = text_of(snapshot_of(started_run(0).after(0, kind, **fields))).splitlines()
    assert any(text.endswith(f":00  {line}") for text in shown)


def test_run_without_steps_is_shown():
    live = TopView()
    live.add_records(started_run(0).events, [])
    for reports, message in (
        (False, "unknown: the script reports no steps"),
        (None, "unknown: no steps have been reported"),
        (True, "none so far"),
    ):
        snapshot = live.snapshot("lit", "COMPLETED", "", [], reports_steps=reports)
        assert f"step   {message}" in text_of(snapshot)
        assert snapshot.document()["reports_steps"] is reports


def test_straggler_is_shown():
    history = started_run(0).steps(1, 20, every=1)
    history.after(0, "straggler", **STRAGGLER)
    text = text_of(snapshot_of(history))
    assert (
        "slow   rank 3 on n7 takes 1.4 times as long as other ranks (computing: 210 ms per step, other ranks"
        in text
    )
    assert "straggler  rank 3 on n7 takes 1.4 times" in text
    assert snapshot_of(history.after(1, "started").steps(21, 30, every=1)).slowest is None


def test_end_of_the_log_is_shown_below_the_events():
    snapshot = snapshot_of(started_run(0).steps(1, 5, every=1), log=[f"line {n}\x1b[2J" for n in range(50)])
    lines = text_of(snapshot, height=30).splitlines()
    assert "\x1b" not in lines[-1]
    assert lines[-1].startswith("line 49")
    assert 5 <= len(lines) - lines.index("log") - 1 <= 10
    assert "log" not in text_of(snapshot_of(started_run(0)))


@pytest.mark.parametrize("width", [30, 80, 200])
def test_curves_of_several_runs_have_one_scale(width):
    # Losses of 1 to 0.1, and of 0.1 to 0.01.
    runs = [
        snapshot_of(started_run(0).steps(1, 100, every=1, last_step=100), "COMPLETED"),
        snapshot_of(started_run(0).steps(1, 1, every=1, loss=0.01), "FAILED"),
        snapshot_of(RunHistory(), "PENDING"),
    ]
    lines = format_overview(runs, width, 24)
    assert max(cell_len(line) for _, line in lines) <= width
    assert [kind for kind, _ in lines] == ["title", "", "bad", ""]
    if width == 200:
        assert lines[1][1].endswith("▁")
        assert "█" in lines[1][1]
        assert lines[2][1].endswith("▁")
    assert format_overview(runs, width, 3)[-1] == (
        "soft",
        cut_line("2 more runs; --filter selects other runs", width),
    )
