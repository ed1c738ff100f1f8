"""Default values that hpctrain sets for variables of a rank, distinguishable from values of the user."""

from __future__ import annotations

from collections.abc import Mapping

#: Names of the variables set this way, so that a job submitted from a rank does not inherit them.
DEFAULTS_VARIABLE = "HPCTRAIN_DEFAULTS"


def apply_env_defaults(environ: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with those `defaults` that it lacks."""
    added = {name: value for name, value in defaults.items() if name not in environ}
    if not added:
        return dict(environ)
    names = [*environ.get(DEFAULTS_VARIABLE, "").split(), *added]
    return {**environ, **added, DEFAULTS_VARIABLE: " ".join(names)}


def env_default_names(environ: Mapping[str, str]) -> set[str]:
    """Return the variables set by `apply_env_defaults`, including `DEFAULTS_VARIABLE` itself."""
    return {DEFAULTS_VARIABLE, *environ.get(DEFAULTS_VARIABLE, "").split()}
