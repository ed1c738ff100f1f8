"""A value that was given to an option, and where."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import SpecError
from hpctrain.jobs.option import Option
from hpctrain.jobs.options import options

#: The key under which a file holds named sets of options.
PROFILES = "profiles"
#: The key under which a file says what the site is like.
SITE = "site"


class Source(NamedTuple):
    """Where the value of an option was given."""

    words: str
    """What to call it, where it is no file."""
    path: Path | None = None
    line: int = 0
    profile: str | None = None
    """The section of the file."""

    def __str__(self) -> str:
        if self.path is None:
            return self.words
        return f"{self.path}:{self.line}" + (f" (profile {self.profile})" if self.profile else "")


DEFAULT = Source("default")


class Given(NamedTuple):
    """One value that was given to an option, or to one entry of it, as in `env.NAME`."""

    key: str
    value: Any
    """None takes back what was given before."""
    source: Source


def find_option(key: str, where: str) -> Option:
    """The option of that name, which a file or `--set` may give.

    Raises:
        SpecError: there is none; the message begins with `where`.
    """
    known = options()
    if key in known and known[key].about.in_files:
        return known[key]
    if key in known:
        raise SpecError(f"{where}{key!r} can be given on the command line only, as {known[key].flag}.")
    if key in (PROFILES, SITE):
        raise SpecError(f"{where}{key!r} is no option: it stands in a file, beside the options.")
    names = [name for name, option in known.items() if option.about.in_files]
    raise SpecError(f"{where}there is no option {key!r}. {nearest(key, (*names, PROFILES, SITE))}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names what may have been meant, or all that there is."""
    from difflib import get_close_matches

    known = list(known)
    close = get_close_matches(word.replace("-", "_"), known, 1)
    return f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."


def wrong_value(label: str, value: object, option: Option) -> str:
    """The sentence on a value that the option does not take."""
    if value == "":
        return f"{label} is empty. Give it a value, or leave it out."
    return f"{label} is {value!r}, but it takes {option.kind}."
