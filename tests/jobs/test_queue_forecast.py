"""Facts about the queue for predictions, from the output of Slurm's commands."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from hpctrain.errors import SchedulerError
from hpctrain.jobs.site.forecast import StartForecast, read_waits


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
