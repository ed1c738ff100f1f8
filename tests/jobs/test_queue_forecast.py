"""Facts about the queue for predictions, from the output of Slurm's commands."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site.forecast import StartForecast, expected_start, read_waits
from hpctrain.jobs.site.job_request import JobRequest


class FakeCall:
    """A call whose answer is known; None is a call that is still running."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def answer(self, timeout_s: float | None = None) -> tuple[str, str]:
        if self._text is None:
            raise SchedulerError(f"sacct did not respond within {timeout_s} s")
        return "", self._text


class FakeAccounting(FakeCall):
    def answer(self, timeout_s: float | None = None) -> tuple[str, str]:
        assert timeout_s == 0.0
        return super().answer(timeout_s)[::-1]


def test_seconds_until_the_expected_start():
    start = datetime.now() + timedelta(hours=1)
    words = (
        f"sbatch: Job 7 to start at {start:%Y-%m-%dT%H:%M:%S} using 2 processors on nodes n1 in partition gpu"
    )
    assert StartForecast(FakeCall(words)).start_s() == pytest.approx(3600, abs=10)
    assert StartForecast(FakeCall(words.replace(f"{start:%Y}", "2020"))).start_s() == 0.0


def test_start_after_jobs_without_a_time_limit_is_unknown(make_spec):
    """Slurm then predicts a start in centuries."""
    forecast = StartForecast(
        FakeCall(
            "sbatch: Job 7 to start at 2282-02-06T05:56:00 using 2 processors on nodes n1 in partition gpu"
        )
    )
    assert forecast.start_s() is None
    sentence = expected_start(JobRequest.from_spec(make_spec(), {}), forecast)
    assert sentence == "No estimated start: according to Slurm, the job waits for jobs without a time limit."


@pytest.mark.parametrize("words", ["", "sbatch: something else", None])
def test_unknown_start(words):
    assert StartForecast(FakeCall(words)).start_s() is None


def test_waits_of_started_jobs():
    rows = ["2026-01-01T10:00:00|2026-01-01T10:05:00", "2026-01-01T10:00:00|Unknown", "damaged", ""]
    assert read_waits(FakeAccounting("\n".join([*rows, "2026-01-01T10:00:00|2026-01-01T09:59:00"]))) == (
        300.0,
        0.0,
    )


def test_slow_accounting_is_not_awaited():
    assert read_waits(FakeAccounting(None)) == ()
