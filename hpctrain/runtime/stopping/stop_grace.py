"""Seconds that the ranks have after each stop signal."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import UserError
from hpctrain.rundir import STOP_GRACE_VARIABLE


def read_stop_grace(environ: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds per signal name; the variable is, for example, `SIGTERM=30,SIGUSR2=120`."""
    text = environ.get(STOP_GRACE_VARIABLE, "")
    try:
        pairs = [word.partition("=") for word in text.split(",") if word.strip()]
        return {name.strip(): float(seconds) for name, _, seconds in pairs}
    except ValueError:
        raise UserError(
            f"{STOP_GRACE_VARIABLE} is {text!r}, but must list signals with grace times in seconds, for "
            "example SIGTERM=30,SIGUSR2=120."
        ) from None
