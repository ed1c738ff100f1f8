"""Requests to the profiler of a rank. `tests/e2e/test_profile.py` profiles runs."""

import json

from helpers.waiting import wait_for

from hpctrain.rundir import RunDir
from hpctrain.runtime.program.step_profiler import StepProfiler


def request(profiler: StepProfiler, run: RunDir, number: int, rank: int = 1) -> None:
    profiler.request(run, 1, {"number": number, "ranks": [0, rank], "steps": 2})


def result(run: RunDir, number: int) -> dict:
    path = run.profile_result(number, 1)
    wait_for(path.exists, 10, str(path))
    return json.loads(path.read_text())


def test_second_request_and_other_ranks_are_refused(tmp_path):
    run, profiler = RunDir(tmp_path), StepProfiler()
    profiler.counts_steps = True
    request(profiler, run, 0, rank=2)
    assert not profiler.is_active
    request(profiler, run, 0)
    assert profiler.is_active
    request(profiler, run, 1)
    assert "previous profile" in result(run, 1)["error"]


def test_request_without_the_step_hook_is_refused(tmp_path):
    run, profiler = RunDir(tmp_path), StepProfiler()
    request(profiler, run, 0)
    assert not profiler.is_active
    assert "HPCTRAIN_STEP_HOOK=0" in result(run, 0)["error"]
