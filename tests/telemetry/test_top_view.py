from __future__ import annotations

import json
import math

import pytest
from helpers.run_histories import START, STRAGGLER, RunHistory, started_run
from rich.cells import cell_len

from hpctrain.telemetry.live.top_view import TopSnapshot, TopView, format_view


def look(story: RunHistory, state: str = "RUNNING", lines: list[dict] | None = None) -> TopSnapshot:
    live = TopView()
    # In two parts, as a run writes them.
    for part in (slice(None, 5), slice(5, None)):
        live.add_records(story.events[part], story.metrics[part])
    return live.snapshot("digits", state, "", lines or [])


def text_of(snapshot: TopSnapshot, width: int = 100, height: int = 30) -> str:
    return "\n".join(line for _, line in format_view(snapshot, width, height))


def test_time_left_goes_by_the_speed_of_the_last_minute():
    story = started_run(0).steps(1, 100, every=5, last_step=400).steps(101, 200, every=2)
    told = look(story)
    assert (told.step, told.last_step, told.loss) == (200, 400, 1 / 200)
    assert told.steps_per_s == pytest.approx(0.5)
    assert told.left_s == pytest.approx(400)
    assert "200 of 400" in text_of(told)
    assert "6 min 40 s left" in text_of(told)


def test_a_loss_that_is_no_number_is_not_passed_over():
    story = started_run(0).steps(1, 9, every=1).steps(10, 12, every=1, loss=math.nan)
    told = look(story)
    assert "loss   NaN since step 10; before that 0.11111" in text_of(told)
    assert look(story.steps(13, 13, every=1)).no_number_since is None


@pytest.mark.slow
def test_a_million_lines_are_taken_in_and_the_newest_losses_kept():
    live = TopView()
    # Dropping old losses one by one from a plain dict would take minutes.
    live.add_records([], ({"step": step, "time": START + step, "loss": 1.0 * step} for step in range(10**6)))
    told = live.snapshot("digits", "RUNNING", "", [])
    assert told.losses == [float(step) for step in range(10**6 - 20_000, 10**6)]
    assert told.steps_per_s == pytest.approx(1)


def test_large_numbers_are_in_groups_of_three_digits():
    told = text_of(look(started_run(0).steps(12344, 12345, every=1, last_step=1234567)))
    assert "step   12\u202f345 of 1\u202f234\u202f567" in told


def test_a_run_that_ended_has_no_speed():
    told = look(started_run(0).steps(1, 100, every=1, last_step=100), "COMPLETED")
    assert (told.steps_per_s, told.left_s) == (None, None)


def test_the_speed_is_that_of_the_attempt():
    story = started_run(0).steps(1, 50, every=1).after(0, "failure", rank=0).after(30, "started")
    assert look(story.steps(41, 60, every=0.1)).steps_per_s == pytest.approx(10)


def test_failures_and_stops_are_counted_but_not_saves_that_failed():
    story = started_run(0).after(0, "failure", cause="disk full").after(0, "failure", rank=1, cause="SIGKILL")
    story.after(0, "started").after(0, "signal", signal="SIGTERM", step=3)
    told = look(story)
    assert (told.failures, told.stops, told.attempt) == (1, 1, 1)
    assert "attempt 1, 1 failure, 1 stop" in text_of(told)


def test_waiting_for_data():
    story = started_run(0).steps(1, 20, every=1, spent={"all": 1.0, "data": 0.25})
    assert look(story).waiting_for_data == pytest.approx(0.25)
    assert "data wait  25.0 %" in text_of(look(story))


def test_gpus_are_bars_of_their_nodes():
    lines = [
        {"host": "n1", "gpu_util": [100.0, 0.0, None], "gpu_memory": [2**30, 2**31, None]},
        {"host": "n2", "gpu_util": [None], "time": "soon"},
        {"host": "n3"},
    ]
    text = text_of(look(started_run(0).steps(1, 2, every=1), lines=lines))
    assert "n1  █▁    50 %  3 GiB" in text
    assert "n2       – %" in text
    assert "n3" not in text


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
@pytest.mark.parametrize("height", [5, 24])
def test_no_line_is_wider_than_the_terminal(width, height):
    story = started_run(0).after(0, "failure", rank=0, cause="because " * 50).after(0, "started")
    story.steps(1, 500, every=1, last_step=123456)
    # Some characters are two columns wide.
    story.after(0, "failure", rank=1, cause="訓練中斷了" * 30)
    lines = [{"host": "節點" * 40, "gpu_util": [50] * 64, "gpu_memory": [10] * 64}] * 40
    told = format_view(look(story, lines=lines), width, height)
    assert max(cell_len(line) for _, line in told) <= max(width, 20)
    assert len(told) < height + 12


def test_the_terminal_obeys_no_name():
    story = started_run(0).after(0, "failure", rank=0, cause="\x1b]0;title\x07\x1b[2J\n\rnew line")
    text = text_of(look(story, lines=[{"host": "\x1b[31m", "gpu_util": [1]}]))
    assert "\x1b" not in text
    assert "\r" not in text


@pytest.mark.parametrize("value", [None, "x", [], True, float("nan"), 10**400])
def test_values_of_another_type(value):
    story = RunHistory().after(0, "failure", rank=value, step=value, cause=value)
    story.metrics += [
        {"step": value, "time": START, "loss": 1.0},
        {"step": 1, "time": value, "loss": 1.0},
        {"step": 1, "time": START, "loss": value, "spent": value, "last_step": value},
        {"step": 2, "time": START + 1, "loss": value, "spent": {"all": value, "data": value}},
    ]
    told = look(story, lines=[{"gpu_util": [value], "gpu_memory": value}])
    json.dumps(told.document())
    text_of(told)


def test_checkpoints_in_a_row_are_one_line():
    story = started_run(0).steps(1, 5, every=1)
    for step in range(10, 610, 10):
        story.after(1, "checkpoint", step=step, tier="local")
        story.after(1, "checkpoint", step=step, tier="shared")
    lines = text_of(look(story)).splitlines()
    assert [line.split("  ", 1)[1] for line in lines if "checkpoint" in line] == [
        "checkpoint  step 600, latest of 60"
    ]
    assert "started" in lines[-2]
    story.after(1, "restart", cause="SIGKILL").after(1, "checkpoint", step=610)
    assert sum("checkpoint" in line for line in text_of(look(story)).splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "fields", "line"),
    [
        ("chaos", {"fault": "kill-rank", "ranks": [3], "host": "n2"}, "chaos  kill-rank, rank 3 on n2"),
        (
            "chaos",
            {"fault": "kill-node-ranks", "ranks": [2, 3], "host": "n2"},
            "chaos  kill-node-ranks, ranks 2-3 on n2",
        ),
        ("chaos", {"fault": "preempt", "ranks": [], "host": None}, "chaos  preempt"),
        (
            "requeue",
            {"by": "requeue", "class": "preempted", "seconds": 93.2},
            "requeue  preempted, after 1 min 33 s",
        ),
        (
            "requeue",
            {"by": "successor", "class": "time-limit", "seconds": 3600.0},
            "requeue  time-limit, after 1 h, successor",
        ),
        (
            "signal",
            {"signal": "SIGTERM", "step": 30, "saved": True},
            "signal  step 30, saved, SIGTERM",
        ),
        ("seen", {"job_id": "25", "job_state": "CANCELLED by 1000"}, "seen  Slurm: job 25 CANCELLED by 1000"),
        ("finished", {"state": "CANCELLED", "cause": None}, "finished  CANCELLED"),
        ("submitted", {"job_id": "25"}, "submitted  job 25"),
    ],
)
def test_an_event_is_shown_with_its_details(kind, fields, line):
    assert line in [one[17:] for one in text_of(look(started_run(0).after(0, kind, **fields))).splitlines()]


def test_a_run_without_steps_says_so():
    live = TopView()
    live.add_records(started_run(0).events, [])
    for reports, words in (
        (False, "unknown: this script reports no steps"),
        (None, "unknown: no steps reported"),
        (True, "none so far"),
    ):
        told = live.snapshot("lit", "COMPLETED", "", [], reports_steps=reports)
        assert f"step   {words}" in text_of(told)
        assert told.document()["reports_steps"] is reports


def test_who_holds_up_the_others():
    story = started_run(0).steps(1, 20, every=1)
    story.after(0, "straggler", **STRAGGLER)
    text = text_of(look(story))
    assert (
        "slow   rank 3 on n7: 1.4 × as long as other ranks, computing: 210 ms per step, others 150 ms" in text
    )
    assert "straggler  rank 3 on n7, 1.4 ×" in text
    assert look(story.after(1, "started").steps(21, 30, every=1)).slowest is None


def test_a_run_that_has_written_nothing():
    assert "no events yet" in text_of(look(RunHistory()))
