"""The signal lead before the time limit, from the observed step and save times."""

import json

import pytest

from hpctrain.record_types import StepRecord
from hpctrain.rundir import RunDir
from hpctrain.supervisor.workers.attempt_runner import longest_step_s, required_lead_s


def record(step, time, attempt=0):
    return StepRecord(step, time, attempt)


@pytest.mark.parametrize(
    ("records", "seconds"),
    [
        ([], 0.0),
        ([record(1, 5.0)], 0.0),
        ([record(1, 5.0), record(2, 6.0), record(3, 16.0), record(4, 17.0)], 10.0),
        # One record every ten steps.
        ([record(10, 5.0), record(20, 25.0)], 2.0),
        # The time between two attempts is not a step.
        ([record(1, 5.0), record(2, 500.0, attempt=1), record(3, 501.0, attempt=1)], 1.0),
    ],
)
def test_longest_step_is_found(records, seconds):
    assert longest_step_s(records) == seconds


@pytest.mark.parametrize(("save_s", "lead"), [(1.0, 120.0), (200.0, 10 + 3 * 4 + 1.25 * 200 + 2)])
def test_lead_is_extended_if_a_save_needs_more(tmp_path, save_s, lead):
    run = RunDir(tmp_path)
    run.log_event("checkpoint", 0, step=5, path="x", seconds=save_s)
    run.log_event("checkpoint", 0, step=6, path="x", seconds=0.5)
    lines = [json.dumps({"step": step, "time": 4.0 * step, "attempt": 0}) for step in range(1, 9)]
    run.metrics.write_text("\n".join([*lines, ""]))
    assert required_lead_s(run, 120.0) == lead
    assert required_lead_s(run, 120.0, 300.0) == min(lead, 150.0)
