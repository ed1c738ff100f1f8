"""Rules that stop losing trials, and their effect on simulated sweeps."""

import math
import random

import pytest
from helpers.run_histories import step_record

from hpctrain.errors import UserError
from hpctrain.record_types import TrialLine, to_record
from hpctrain.sweeps.stopping_rules import StoppingRule, TrialCurve, TrialReport

MEDIAN = StoppingRule("median", "loss", "min", 10)
ASHA = StoppingRule("asha", "loss", "min", 10, 3)


def report(best: float, mean: float | None = None) -> TrialReport:
    return TrialReport(10, best, best if mean is None else mean)


def test_rules_are_parsed():
    assert StoppingRule.parse("asha:4", "loss", "min", 5).factor == 4
    assert StoppingRule.parse("median", "loss", "max", 5).name == "median"
    for text in ("asha:1", "asha:x", "median:2", "", "asha:²"):
        with pytest.raises(UserError, match="must be median, asha or asha:FACTOR"):
            StoppingRule.parse(text, "loss", "min", 5)


def test_median_rule_compares_with_the_means_of_the_others():
    others = [report(0, mean) for mean in (1.0, 2.0, 3.0)]
    assert MEDIAN.reason_to_stop(report(2.0), others) is None
    assert MEDIAN.reason_to_stop(report(2.1), others[:2]) is None
    assert MEDIAN.reason_to_stop(report(2.1), others) == (
        "stopped early at step 10 by the median rule: the best loss so far is 2.1, worse than 2, the median "
        "of 3 other trials"
    )
    assert MEDIAN.reason_to_stop(report(math.inf), others)


def test_asha_keeps_the_best_part():
    others = [report(value) for value in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert ASHA.reason_to_stop(report(1.5), others) is None
    assert ASHA.reason_to_stop(report(2.0), others) is None, "ties continue"
    assert ASHA.reason_to_stop(report(2.5), others) == (
        "stopped early at step 10 by ASHA: 2 trials of 6 had a better loss than 2.5, and the best 2 continue"
    )
    assert ASHA.reason_to_stop(report(9.0), others[:1]) is None
    assert ASHA.reason_to_stop(report(9.0), others[:2])


def test_curve_reports_the_best_and_the_mean():
    curve = TrialCurve(StoppingRule("asha", "acc", "max", 2, 2))
    reports = [
        curve.add(step_record(step, acc=value))
        for step, value in enumerate([0.5, 0.1, math.nan, 0.9, 0.8], 1)
    ]
    assert [one and (one.step, one.best) for one in reports] == [None, (2, -0.5), None, (4, -0.9), None]
    assert reports[3].mean == pytest.approx(-0.5)
    assert curve.add(step_record(16, other=1)) is None
    assert curve.add(step_record(17, acc=1)) == TrialReport(16, -1, pytest.approx(-0.66))
    assert curve.add(step_record(9, acc=1)) is None
    nothing = TrialCurve(MEDIAN).add(step_record(10, loss=math.inf))
    assert nothing == TrialReport(10, math.inf, math.inf)
    assert TrialReport.from_line(to_record(nothing.record(), TrialLine)) == nothing


@pytest.mark.parametrize("rule", [MEDIAN, ASHA], ids=["median", "asha"])
def test_simulated_sweeps_keep_the_best_trial_and_save_a_third_of_the_steps(rule):
    """Twenty trials with noisy curves that do not cross, at different speeds."""
    saved = []
    for seed in range(20):
        generator = random.Random(seed)
        levels = [0.1 * number for number in range(20)]
        generator.shuffle(levels)
        curves = [TrialCurve(rule) for _ in levels]
        reports: list[dict[int, TrialReport]] = [{} for _ in levels]
        position, stopped = [0] * 20, set[int]()
        while active := [n for n in range(20) if n not in stopped and position[n] < 100]:
            trial = generator.choice(active)
            position[trial] += 1
            loss = levels[trial] + 1 / position[trial] + generator.uniform(-0.02, 0.02)
            if one := curves[trial].add(step_record(position[trial], loss=loss)):
                reports[trial][one.step] = one
            if reports[trial]:
                own = reports[trial][max(reports[trial])]
                others = [its[own.step] for n, its in enumerate(reports) if n != trial and own.step in its]
                if rule.reason_to_stop(own, others):
                    stopped.add(trial)
        assert levels.index(0.0) not in stopped
        saved.append(1 - sum(position) / 2000)
    assert min(saved) > 1 / 3, saved
