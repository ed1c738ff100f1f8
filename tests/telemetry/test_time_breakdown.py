from typing import Any

import pytest
from helpers.run_histories import START, RunHistory, event, started_run
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hpctrain.record_types import Event, StepRecord
from hpctrain.rundir import EventKind
from hpctrain.telemetry.accounting.time_breakdown import (
    NO_STEPS_NOTE,
    Goodput,
    TimeBreakdown,
    compute_goodput,
)
from hpctrain.telemetry.accounting.timeline_events import TimeCategory


def breakdown_of(history: RunHistory, **options: Any) -> TimeBreakdown:
    return TimeBreakdown.from_records(history.events, history.metrics, **options)


def seconds(history: RunHistory, **options: Any) -> dict[str, float]:
    """Return the seconds per category; check that they add up."""
    breakdown = breakdown_of(history, **options)
    assert sum(breakdown.totals_us.values()) == breakdown.wall_us
    return {category.value: us / 1e6 for category, us in breakdown.totals_us.items() if us}


def test_undisturbed_run():
    history = (
        started_run(60).steps(1, 1, every=20).steps(2, 100, every=1).after(5, "finished", state="COMPLETED")
    )
    # Without the start of the first step, everything before its end counts as starting.
    assert seconds(history) == {"queued": 60, "starting": 20, "training": 99, "idle": 5}


def test_recorded_duration_of_first_step_counts_as_training():
    history = started_run(60).steps(1, 1, every=20, spent={"all": 3.0}).steps(2, 100, every=1)
    assert seconds(history) == {"queued": 60, "starting": 17, "training": 102}


def test_steps_after_the_checkpoint_are_lost_in_a_crash():
    history = started_run(1).steps(1, 1, every=10).steps(2, 50, every=1)
    history.after(0.5, "failure", rank=3, cause="…").after(2, "restart", cause="…").after(1, "started")
    history.after(7, "resumed", step=40).steps(41, 60, every=1).after(1, "finished", state="COMPLETED")
    breakdown = breakdown_of(history)
    assert seconds(history) == {
        "queued": 1,
        "starting": 10 + 7,
        "training": 39 + 20,
        "lost work": 10 + 0.5,
        "restarting": 3,
        "idle": 1,
    }
    assert breakdown.lost_steps == 10
    assert [span.category for span in breakdown.spans if span.attempt == 0][:3] == [
        "starting",
        "training",
        "lost work",
    ]


def test_all_steps_are_lost_without_a_checkpoint():
    history = started_run(0).steps(1, 10, every=1).after(0, "failure", rank=0).after(1, "restart")
    history.after(0, "started").steps(1, 1, every=5).steps(2, 20, every=1)
    assert seconds(history) == {"starting": 1 + 5, "lost work": 9, "restarting": 1, "training": 19}
    assert breakdown_of(history).lost_steps == 10


def test_pause_of_the_ranks_is_idle():
    history = started_run(0).steps(1, 1, every=1).steps(2, 11, every=1)
    history.steps(12, 12, every=101)
    history.after(0, "paused", rank=0, seconds=100.0).steps(13, 20, every=1)
    history.after(0, "finished", state="COMPLETED")
    assert seconds(history) == {"starting": 1, "training": 19, "idle": 100}


def test_unlogged_steps_in_a_checkpoint_are_not_lost():
    history = started_run(0).after(2, "resumed", step=0).steps(100, 100, every=100)
    history.after(50, "checkpoint", step=150, seconds=0.0, stall_s=0.0)
    history.after(25, "failure", rank=0).after(0, "restart").after(0, "started").after(0, "resumed", step=150)
    assert seconds(history) == {"starting": 2, "training": 150, "lost work": 25}


def test_preempted_run_is_queued():
    history = started_run(5).steps(1, 1, every=1).steps(2, 20, every=1)
    history.after(2, "signal", signal="SIGTERM", step=20, saved=True).after(3, "requeue", by="requeue")
    history.after(100, "started").after(4, "resumed", step=20).steps(21, 30, every=1)
    assert seconds(history) == {
        "queued": 5 + 100,
        "starting": 1 + 4,
        "training": 19 + 10,
        "saving": 2,
        "restarting": 3,
    }


def test_lost_node_without_an_event():
    history = started_run(0).steps(1, 1, every=1).steps(2, 20, every=1)
    history.after(300, "started").after(4, "resumed", step=15).steps(16, 30, every=1)
    assert seconds(history) == {"starting": 1 + 4, "training": 14 + 15, "lost work": 5, "queued": 300}


def test_async_save_counts_only_its_stall():
    history = started_run(0).steps(1, 1, every=1).steps(2, 11, every=1)
    begun = START + 6  # after step 6
    history.events += [
        event("checkpoint", time=begun + 3, step=6, seconds=3.0, stall_s=0.25),
        # The copy out of the local tier runs during training.
        event("checkpoint", time=begun + 5, step=6, seconds=5.0),
    ]
    assert seconds(history) == {"starting": 1, "training": 9.75, "saving": 0.25}


def test_times_reported_by_ranks_are_separate_categories():
    history = (
        started_run(0).steps(1, 1, every=1).steps(2, 11, every=2, spent={"data": 0.5, "validation": 0.25})
    )
    breakdown = breakdown_of(history)
    assert seconds(history) == {"starting": 1, "training": 12.5, "waiting for data": 5.0, "validating": 2.5}
    assert TimeCategory.DATA in breakdown.measured
    assert TimeCategory.COMMUNICATING not in breakdown.measured


def test_script_without_steps():
    history = started_run(3).after(20, "failure", rank=0).after(1, "restart").after(0, "started")
    history.after(30, "finished", state="COMPLETED")
    assert seconds(history) == {"queued": 3, "training": 20 + 30, "restarting": 1}
    breakdown = breakdown_of(history)
    assert breakdown.notes == (NO_STEPS_NOTE,)
    assert (breakdown.lost_steps, breakdown.knows_lost_work) == (None, False)
    assert compute_goodput(breakdown) == Goodput(ettr=None, training=None)


@pytest.mark.parametrize(
    ("history", "is_pending", "category"),
    [
        (RunHistory().after(0, "submitted"), True, "queued"),
        (RunHistory().after(0, "submitted"), False, "queued"),
        (started_run(0).steps(1, 1, every=0), False, "training"),
        (started_run(0).after(0, "resumed", step=3), False, "training"),
        # Slurm took the nodes away, and no process was left to record it.
        (started_run(0).steps(1, 1, every=0), True, "queued"),
        (started_run(0).after(0, "resumed", step=3).after(0, "failure", rank=1), False, "idle"),
    ],
)
def test_active_run_is_counted_up_to_now(history, is_pending, category):
    assert seconds(history, until=START + 50, waits=is_pending) == {category: 50}


def test_training_without_a_supervisor():
    history = RunHistory()
    history.attempt = 0
    history.steps(1, 1, every=1, spent={"all": 1.0}).steps(2, 10, every=1)
    history.attempt, history.now = 1, history.now + 100
    history.after(0, "resumed", step=8).steps(9, 20, every=1)
    assert seconds(history) == {"training": 8 + 12, "lost work": 2, "idle": 100}


TIMES, COUNTS, SECONDS = st.floats(START, START + 1000), st.integers(0, 30), st.floats(0, 50)
ATTEMPTS = st.integers(0, 3)
EVENTS = st.builds(
    Event,
    time=TIMES,
    attempt=ATTEMPTS,
    kind=st.sampled_from(EventKind.__args__),
    step=st.one_of(st.none(), COUNTS),
    seconds=SECONDS,
    stall_s=st.one_of(st.none(), SECONDS),
    rank=ATTEMPTS,
    saved=st.booleans(),
    state=st.sampled_from(["COMPLETED", "FAILED"]),
    **{name: st.just("x") for name in ("job_id", "backend", "job_state")},
    **{name: st.just(0) for name in ("num_bytes", "reused", "saved_s")},
    **{name: st.just([]) for name in ("hosts", "parts", "slowest_nodes")},
)
SPENT = st.dictionaries(st.sampled_from(["all", "data", "communication", "validation"]), SECONDS)
METRICS = st.builds(StepRecord, COUNTS, TIMES, ATTEMPTS, spent=SPENT)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(EVENTS, max_size=25),
    st.lists(METRICS, max_size=25),
    st.one_of(st.none(), st.floats(START - 10, START + 2000)),
    st.booleans(),
    st.booleans(),
)
def test_every_microsecond_counts_once_in_any_record(events, metrics, until, is_pending, in_order):
    if in_order:
        for records in (events, metrics):
            records.sort(key=lambda record: record.time)
    breakdown = TimeBreakdown.from_records(events, metrics, until=until, waits=is_pending)
    assert sum(breakdown.totals_us.values()) == breakdown.wall_us
    for span in breakdown.spans:
        assert span.start_us < span.end_us
    for span, following in zip(breakdown.spans, breakdown.spans[1:], strict=False):
        assert span.end_us == following.start_us
        assert (span.category, span.attempt) != (following.category, following.attempt)
    if until is not None and breakdown.spans:
        assert breakdown.spans[-1].end_us == round(until * 1e6)
    assert (breakdown.lost_steps or 0) >= 0
    assert (breakdown.lost_steps is None) == (not breakdown.knows_lost_work)
    for share in vars(compute_goodput(breakdown)).values():
        assert share is None or 0 <= share <= 1


def test_goodput():
    history = started_run(100).steps(1, 1, every=50, spent={"all": 2.0}).steps(2, 50, every=2)
    history.after(10, "checkpoint", step=50, seconds=10.0).after(0, "finished", state="COMPLETED")
    history.after(500, "submitted").after(0, "started")
    goodput = compute_goodput(breakdown_of(history), history.metrics)
    assert goodput.ettr == pytest.approx(100 / (100 + 48 + 100 + 10))
    assert goodput.training == pytest.approx(100 / (100 + 48 + 100 + 10 + 500))
    assert goodput.mfu is None


def test_mfu_is_computed_from_reported_flops():
    flops = {"model_flops": 4e15, "peak_flops": 4e15}
    history = started_run(0).steps(1, 1, every=9, spent={"all": 2.0}, **flops).steps(2, 50, every=2, **flops)
    # 4·10^15 operations in two seconds, with 4·10^15 possible in each.
    assert compute_goodput(breakdown_of(history), history.metrics).mfu == pytest.approx(0.5)
    # Every tenth step is logged: it stands for ten.
    assert compute_goodput(breakdown_of(history), history.metrics[9::10]).mfu == pytest.approx(0.5)
    # The steps before an imported checkpoint belong to another run.
    imported = [replace(record, step=record.step + 1000) for record in history.metrics]
    assert compute_goodput(breakdown_of(history), imported, 1000).mfu == pytest.approx(0.5)
