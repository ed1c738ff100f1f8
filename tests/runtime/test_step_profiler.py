"""Requests to the profiler of a rank. `tests/e2e/test_profile.py` profiles runs."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.waiting import wait_for

from hpctrain.rundir import RunDir
from hpctrain.runtime.program import step_profiler as module
from hpctrain.runtime.program.step_profiler import StepProfiler
from hpctrain.runtime.rank_activity import RankActivity


@pytest.fixture
def activity(monkeypatch) -> RankActivity:
    monkeypatch.setattr(module, "activity", RankActivity())
    return module.activity


@pytest.fixture
def profiler() -> StepProfiler:
    profiler = StepProfiler()
    profiler.counts_steps = True
    return profiler


def step(profiler: StepProfiler, activity: RankActivity) -> None:
    torch.ones(2).add(1)
    activity.optimizer_steps += 1
    if profiler.is_active:
        profiler.after_step()


def request(profiler: StepProfiler, run: RunDir, number: int, ranks: tuple[int, ...] = (1,)) -> None:
    profiler.request(run, 1, {"number": number, "ranks": list(ranks), "steps": 2})


def result(run: RunDir, number: int) -> dict:
    path = run.profile_result(number, 1)
    wait_for(path.exists, 10, str(path))
    return json.loads(path.read_text())


def test_profile_covers_the_requested_steps_of_the_requested_rank(tmp_path, activity, profiler):
    run = RunDir(tmp_path)
    request(profiler, run, 0, ranks=(0, 2))
    assert not profiler.is_active
    request(profiler, run, 0)
    step(profiler, activity)
    request(profiler, run, 1)
    assert "previous profile" in result(run, 1)["error"]
    step(profiler, activity)
    assert profiler.is_active
    step(profiler, activity)
    assert not profiler.is_active
    done = result(run, 0)
    assert (done["rank"], done["first_step"], done["last_step"]) == (1, 2, 3)
    assert {"aten::add": 2}.items() <= {one["name"]: one["calls"] for one in done["operators"]}.items()


def test_request_without_the_step_hook_is_refused(tmp_path):
    run, profiler = RunDir(tmp_path), StepProfiler()
    request(profiler, run, 0)
    assert not profiler.is_active
    assert "HPCTRAIN_STEP_HOOK=0" in result(run, 0)["error"]
