"""Reading numbers out of an environment, with errors that name the variable."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import EnvironmentMismatch


def first_of(environ: Mapping[str, str], *names: str) -> str | None:
    """The first of `names` that is set to something, or None."""
    return next((name for name in names if environ.get(name)), None)


def read_int(environ: Mapping[str, str], name: str) -> int:
    """The number in variable `name`.

    Raises:
        EnvironmentMismatch: the variable is missing or holds no whole number.
    """
    text = environ.get(name)
    if text is None:
        raise EnvironmentMismatch(
            f"{name} is not set, though its neighbours are. Start with srun or torchrun."
        )
    try:
        return int(text)
    except ValueError:
        raise EnvironmentMismatch(f"{name} is {text!r}, which is not a whole number.") from None
