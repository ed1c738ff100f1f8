"""Convert between Slurm's notation of durations and seconds."""

from __future__ import annotations

import re

from hpctrain.errors import SpecError

_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_DURATION = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<clock>\d{1,9}(?::\d{1,2}){0,2})", re.ASCII)

#: Seconds per clock field, by whether there are days before it and by the number of fields.
_WEIGHTS = {
    (False, 1): (60,),
    (False, 2): (60, 1),
    (False, 3): (3600, 60, 1),
    (True, 1): (3600,),
    (True, 2): (3600, 60),
    (True, 3): (3600, 60, 1),
}


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration in one of the forms of sbatch's `--time`; None means no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SpecError(f"{text!r} is not a valid duration. Use {_FORMS}, or 'unlimited'.")
    clock = [int(digits) for digits in match["clock"].split(":")]
    weights = _WEIGHTS[match["days"] is not None, len(clock)]
    days = int(match["days"] or 0)
    seconds = 86400 * days + sum(digits * weight for digits, weight in zip(clock, weights, strict=True))
    if seconds == 0:
        raise SpecError(f"The duration {text!r} is zero. Use a longer duration or 'unlimited'.")
    return float(seconds)


def format_time_limit(seconds: float | None) -> str:
    """Return `D-HH:MM:SS`, or `HH:MM:SS` below a day, rounded up to whole seconds; None is `unlimited`."""
    if seconds is None:
        return "unlimited"
    minutes, left_over = divmod(-int(-seconds // 1), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{left_over:02d}"
    return f"{days}-{clock}" if days else clock
