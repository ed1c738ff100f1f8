from __future__ import annotations

from typing import Any

import pytest
from helpers.run_histories import START, RunHistory, started_run
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.rundir import EventKind
from hpctrain.telemetry.accounting.goodput import Goodput, compute_goodput
from hpctrain.telemetry.accounting.time_breakdown import NO_STEPS_NOTE, TimeBreakdown
from hpctrain.telemetry.accounting.time_spans import TimeCategory


def ledger_of(story: RunHistory, **options: Any) -> TimeBreakdown:
    return TimeBreakdown.from_records(story.events, story.metrics, **options)


def seconds(story: RunHistory, **options: Any) -> dict[str, float]:
    """Where the time went, in whole seconds; checked to add up."""
    ledger = ledger_of(story, **options)
    assert sum(ledger.totals_us.values()) == ledger.wall_us
    return {what.value: us / 1e6 for what, us in ledger.totals_us.items() if us}


def test_a_run_that_nobody_disturbs():
    story = (
        started_run(60).steps(1, 1, every=20).steps(2, 100, every=1).after(5, "finished", state="COMPLETED")
    )
    # When the first step began is not told: what comes before its end counts as start.
    assert seconds(story) == {"queued": 60, "starting": 20, "training": 99, "idle": 5}


def test_when_the_first_step_began_may_be_told():
    story = started_run(60).steps(1, 1, every=20, spent={"all": 3.0}).steps(2, 100, every=1)
    assert seconds(story) == {"queued": 60, "starting": 17, "training": 102}


def test_steps_after_the_checkpoint_are_lost_where_a_rank_crashes():
    story = started_run(1).steps(1, 1, every=10).steps(2, 50, every=1)
    story.after(0.5, "failure", rank=3, cause="…").after(2, "restart", cause="…").after(1, "started")
    story.after(7, "resumed", step=40).steps(41, 60, every=1).after(1, "finished", state="COMPLETED")
    ledger = ledger_of(story)
    assert seconds(story) == {
        "queued": 1,
        "starting": 10 + 7,
        "training": 39 + 20,
        "lost work": 10 + 0.5,
        "restarting": 3,
        "idle": 1,
    }
    assert ledger.lost_steps == 10
    assert [span.category for span in ledger.spans if span.attempt == 0][:3] == [
        "starting",
        "training",
        "lost work",
    ]


def test_steps_lost_twice_are_counted_twice():
    story = started_run(0).steps(1, 1, every=1)
    for _ in range(2):
        story.steps(2, 11, every=1).after(0, "failure", rank=0).after(0, "restart").after(0, "started")
        story.after(0, "resumed", step=1)
    story.steps(2, 11, every=1)
    assert seconds(story) == {"starting": 1, "training": 10, "lost work": 20}
    assert ledger_of(story).lost_steps == 20


def test_ranks_without_a_checkpoint_begin_anew():
    story = started_run(0).steps(1, 10, every=1).after(0, "failure", rank=0).after(1, "restart")
    story.after(0, "started").steps(1, 1, every=5).steps(2, 20, every=1)
    assert seconds(story) == {"starting": 1 + 5, "lost work": 9, "restarting": 1, "training": 19}
    assert ledger_of(story).lost_steps == 10


def test_of_steps_logged_together_the_part_after_the_checkpoint_is_lost():
    story = started_run(0).steps(10, 10, every=30)
    story.metrics += [{"step": 20, "time": story.now + 10, "attempt": 0, "loss": 1.0}]
    story.now += 10
    story.after(0, "failure", rank=0).after(0, "restart").after(0, "started").after(0, "resumed", step=13)
    assert seconds(story) == {"starting": 30, "training": 3, "lost work": 7}


def test_steps_that_nobody_logged_but_a_checkpoint_holds_are_not_lost():
    story = started_run(0).after(2, "resumed", step=0).steps(100, 100, every=100)
    story.after(50, "checkpoint", step=150, seconds=0.0, stall_s=0.0)
    story.after(25, "failure", rank=0).after(0, "restart").after(0, "started").after(0, "resumed", step=150)
    assert seconds(story) == {"starting": 2, "training": 150, "lost work": 25}


def test_a_script_that_logs_no_step_but_saves():
    story = started_run(1).after(29, "checkpoint", step=None).after(1, "failure", rank=0, cause="…")
    story.after(0, "finished", state="FAILED")
    assert seconds(story) == {"queued": 1, "training": 30}
    assert ledger_of(story).lost_steps is None


def test_a_run_that_was_preempted_waits_in_the_queue():
    story = started_run(5).steps(1, 1, every=1).steps(2, 20, every=1)
    story.after(2, "signal", signal="SIGTERM", step=20, saved=True).after(3, "requeue", by="requeue")
    story.after(100, "started").after(4, "resumed", step=20).steps(21, 30, every=1)
    assert seconds(story) == {
        "queued": 5 + 100,
        "starting": 1 + 4,
        "training": 19 + 10,
        "saving": 2,
        "restarting": 3,
    }


def test_a_node_that_is_lost_says_no_word():
    story = started_run(0).steps(1, 1, every=1).steps(2, 20, every=1)
    story.after(300, "started").after(4, "resumed", step=15).steps(16, 30, every=1)
    assert seconds(story) == {"starting": 1 + 4, "training": 14 + 15, "lost work": 5, "queued": 300}


def test_saves_hold_up_the_training_for_their_copy_only():
    story = started_run(0).steps(1, 1, every=1).steps(2, 11, every=1)
    begun = START + 6  # after step 6
    story.events += [
        {"time": begun + 3, "attempt": 0, "kind": "checkpoint", "step": 6, "seconds": 3.0, "stall_s": 0.25},
        # The copy out of the fast folder is made while the training goes on.
        {"time": begun + 5, "attempt": 0, "kind": "checkpoint", "step": 6, "seconds": 5.0},
    ]
    assert seconds(story) == {"starting": 1, "training": 9.75, "saving": 0.25}


def test_the_last_save_is_waited_for():
    story = started_run(0).steps(1, 1, every=1).steps(2, 11, every=1)
    story.after(4, "checkpoint", step=11, seconds=4.0).after(1, "finished", state="COMPLETED")
    assert seconds(story) == {"starting": 1, "training": 10, "saving": 4, "idle": 1}


def test_a_save_that_failed_is_no_end():
    story = (
        started_run(0).steps(1, 5, every=1).after(0.5, "failure", cause="disk full").steps(6, 6, every=0.5)
    )
    assert seconds(story) == {"starting": 1, "training": 5}


def test_what_the_ranks_tell_apart_is_told_apart():
    story = started_run(0).steps(1, 1, every=1).steps(2, 11, every=2, spent={"data": 0.5, "validation": 0.25})
    ledger = ledger_of(story)
    assert seconds(story) == {
        "starting": 1,
        "training": 12.5,
        "waiting for data": 5.0,
        "validating": 2.5,
    }
    assert TimeCategory.DATA in ledger.measured
    assert TimeCategory.COMMUNICATING not in ledger.measured


def test_no_more_is_told_apart_than_there_was():
    story = started_run(0).steps(1, 1, every=1).steps(2, 2, every=2, spent={"data": 5.0, "validation": 1.0})
    assert seconds(story) == {"starting": 1, "waiting for data": 2}


def test_loading_is_told_where_it_was_measured():
    story = started_run(0).steps(1, 1, every=1).after(0, "requeue").after(0, "started")
    story.after(9, "resumed", step=1, seconds=2.0)
    assert seconds(story) == {"starting": 1 + 7, "loading": 2}


def test_a_script_that_logs_no_step():
    story = started_run(3).after(20, "failure", rank=0).after(1, "restart").after(0, "started")
    story.after(30, "finished", state="COMPLETED")
    assert seconds(story) == {"queued": 3, "training": 20 + 30, "restarting": 1}
    ledger = ledger_of(story)
    assert ledger.notes == (NO_STEPS_NOTE,)
    assert (ledger.lost_steps, ledger.knows_lost_work) == (None, False)
    assert compute_goodput(ledger) == Goodput(ettr=None, training=None)


def test_an_ended_run_that_is_submitted_again():
    story = started_run(0).steps(1, 1, every=1).steps(2, 5, every=1).after(1, "finished", state="FAILED")
    story.after(1000, "submitted").after(2, "started").after(3, "resumed", step=5).steps(6, 6, every=1)
    assert seconds(story) == {"starting": 1 + 3, "training": 4 + 1, "idle": 1 + 1000, "queued": 2}


def test_a_cancelled_run():
    story = started_run(0).steps(1, 5, every=1).after(1, "signal", step=5, saved=True)
    story.after(2, "finished", state="CANCELLED")
    assert seconds(story) == {"starting": 1, "training": 4, "saving": 1, "idle": 2}


@pytest.mark.parametrize(
    ("story", "waits", "what"),
    [
        (RunHistory().after(0, "submitted"), True, "queued"),
        (RunHistory().after(0, "submitted"), False, "queued"),
        (started_run(0).steps(1, 1, every=0), False, "training"),
        (started_run(0).after(0, "resumed", step=3), False, "training"),
        # Slurm took the nodes away, and nobody was left to write that down.
        (started_run(0).steps(1, 1, every=0), True, "queued"),
        (started_run(0).after(0, "resumed", step=3).after(0, "failure", rank=1), False, "idle"),
    ],
)
def test_a_run_that_goes_on_is_told_of_up_to_now(story, waits, what):
    assert seconds(story, until=START + 50, waits=waits) == {what: 50}


def test_a_training_that_nobody_supervises():
    story = RunHistory()
    story.attempt = 0
    story.steps(1, 1, every=1, spent={"all": 1.0}).steps(2, 10, every=1)
    story.attempt, story.now = 1, story.now + 100
    story.after(0, "resumed", step=8).steps(9, 20, every=1)
    assert seconds(story) == {"training": 8 + 12, "lost work": 2, "idle": 100}


def test_a_folder_without_a_record():
    ledger = TimeBreakdown.from_records([])
    assert ledger.spans == ()
    assert ledger.wall_us == 0
    assert compute_goodput(ledger).ettr is None


def test_a_clock_that_goes_backward_takes_no_time():
    story = started_run(10)
    story.now -= 5  # Rank 0 runs on a host whose clock is late.
    story.steps(1, 1, every=1).steps(2, 10, every=1)
    assert seconds(story)["queued"] + seconds(story)["training"] == 10 + 5


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.none(), max_size=1),
)
TIMES = st.one_of(st.floats(START, START + 1000), st.floats(START, START + 1000), ANYTHING)
COUNTS = st.one_of(st.integers(0, 30), st.integers(0, 30), ANYTHING)
SECONDS = st.one_of(st.floats(0, 50), ANYTHING)
KINDS = st.one_of(st.sampled_from(EventKind.__args__), st.text(max_size=3))
EVENTS = st.fixed_dictionaries(
    {"time": TIMES, "kind": KINDS},
    optional={
        "attempt": st.one_of(st.integers(0, 3), COUNTS),
        "step": COUNTS,
        "seconds": SECONDS,
        "stall_s": SECONDS,
        "rank": COUNTS,
        "saved": st.booleans(),
        "state": st.sampled_from(["COMPLETED", "FAILED"]),
    },
)
SPENT = st.one_of(
    ANYTHING, st.dictionaries(st.sampled_from(["all", "data", "communication", "validation"]), SECONDS)
)
METRICS = st.fixed_dictionaries(
    {"time": TIMES, "step": COUNTS, "attempt": st.integers(0, 3)}, optional={"spent": SPENT}
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(EVENTS, max_size=25),
    st.lists(METRICS, max_size=25),
    st.one_of(st.none(), st.floats(START - 10, START + 2000)),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_on_record_every_microsecond_is_counted_once(events, metrics, until, waits, in_order):
    if in_order:
        for records in (events, metrics):
            records.sort(key=lambda record: record["time"] if type(record["time"]) is float else START)
    ledger = TimeBreakdown.from_records(events, metrics, until=until, waits=waits)
    assert sum(ledger.totals_us.values()) == ledger.wall_us
    for span in ledger.spans:
        assert span.start_us < span.end_us
    for span, following in zip(ledger.spans, ledger.spans[1:], strict=False):
        assert span.end_us == following.start_us
        assert (span.category, span.attempt) != (following.category, following.attempt)
    if until is not None and ledger.spans:
        assert ledger.spans[-1].end_us == round(until * 1e6)
    assert (ledger.lost_steps or 0) >= 0
    assert (ledger.lost_steps is None) == (not ledger.knows_lost_work)
    for share in vars(compute_goodput(ledger)).values():
        assert share is None or 0 <= share <= 1


def test_goodput():
    story = started_run(100).steps(1, 1, every=50, spent={"all": 2.0}).steps(2, 50, every=2)
    story.after(10, "checkpoint", step=50, seconds=10.0).after(0, "finished", state="COMPLETED")
    story.after(500, "submitted").after(0, "started")
    goodput = compute_goodput(ledger_of(story), story.metrics)
    assert goodput.ettr == pytest.approx(100 / (100 + 48 + 100 + 10))
    assert goodput.training == pytest.approx(100 / (100 + 48 + 100 + 10 + 500))
    assert goodput.mfu is None


def test_model_flops_utilisation_is_told_where_the_run_tells_its_flops():
    flops = {"model_flops": 4e15, "peak_flops": 4e15}
    story = started_run(0).steps(1, 1, every=9, spent={"all": 2.0}, **flops).steps(2, 50, every=2, **flops)
    # 4·10^15 operations in two seconds, of 4·10^15 that were possible in each.
    assert compute_goodput(ledger_of(story), story.metrics).mfu == pytest.approx(0.5)
    # Every tenth step is logged: it stands for ten.
    assert compute_goodput(ledger_of(story), story.metrics[9::10]).mfu == pytest.approx(0.5)
