"""Option values and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import SpecError
from hpctrain.jobs.options.extra_directives import explain_foreign
from hpctrain.jobs.options.option import Option
from hpctrain.jobs.options.table import all_options
from hpctrain.text import suggest

#: Key of the named sets of options in a file.
PROFILES_KEY = "profiles"
#: Key of the site description in a file.
SITE_KEY = "site"
#: Key of the search space of `hpctrain sweep` in a file.
SWEEP_KEY = "sweep"


class OptionSource(NamedTuple):
    """The source of an option's value."""

    words: str
    """Name of a source that is not a file."""
    path: Path | None = None
    line: int = 0
    profile: str | None = None
    """Section of the file."""

    def __str__(self) -> str:
        if self.path is None:
            return self.words
        return f"{self.path}:{self.line}" + (f" (profile {self.profile})" if self.profile else "")


DEFAULT_SOURCE = OptionSource("default")


class OptionValue(NamedTuple):
    """A value of an option, or of one entry of it, as in `env.NAME`."""

    key: str
    value: Any
    """None removes values from weaker sources."""
    source: OptionSource


def find_option(key: str, where: str) -> Option:
    """Return the option of that name, if files and `--set` accept it.

    Raises:
        SpecError: there is no such option; the message begins with `where`.
    """
    known = all_options()
    if key in known and known[key].about.in_files:
        return known[key]
    if key in known:
        raise SpecError(f"{where}{key!r} is only accepted on the command line, as {known[key].flag}.")
    if key in (PROFILES_KEY, SITE_KEY, SWEEP_KEY):
        raise SpecError(f"{where}{key!r} is a section of configuration files, not an option.")
    names = [name for name, option in known.items() if option.about.in_files]
    hint = explain_foreign(key) or suggest(key, (*names, PROFILES_KEY, SITE_KEY, SWEEP_KEY))
    raise SpecError(f"{where}unknown option {key!r}. {hint}")


def invalid_value_message(label: str, value: object, option: Option) -> str:
    """Return the error message for a value that the option does not accept."""
    if value == "":
        return f"{label} is empty. Set a value, or remove the option."
    return f"{label} is {value!r}, but must be {option.kind}."
