"""Variables that hpctrain sets for a rank where the user has not, told apart from the user's own."""

from __future__ import annotations

from collections.abc import Mapping

#: Names of the variables that were set this way, so that a job submitted from a rank does not inherit them.
DEFAULTS_VARIABLE = "HPCTRAIN_DEFAULTS"


def with_defaults(environ: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """`environ` with those of `defaults` that are not in it."""
    added = {name: value for name, value in defaults.items() if name not in environ}
    if not added:
        return dict(environ)
    names = [*environ.get(DEFAULTS_VARIABLE, "").split(), *added]
    return {**environ, **added, DEFAULTS_VARIABLE: " ".join(names)}


def names_of_defaults(environ: Mapping[str, str]) -> set[str]:
    """What `with_defaults` has set in `environ`, the note about it included."""
    return {DEFAULTS_VARIABLE, *environ.get(DEFAULTS_VARIABLE, "").split()}
