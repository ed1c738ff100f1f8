"""Removal of secrets from a run's specification and environment for the report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED_TEXT = "(not shown)"

#: Names of variables whose values are secret.
_SECRET = re.compile(
    r"key|token|secret|passw|credential|auth|(?:^|_)(?:pat|pwd|dsn)(?:_|$)|^HPCTRAIN_SUPERVISOR",
    re.IGNORECASE,
)
#: The same at the end of a name within other text. Stricter, because of words such as --max-tokens. Texts may
#: be long, so each pattern can start at few positions and scans forward once.
_NAME = (
    r"[\w.-]*(?:key|token|secret|passw(?:or)?d|credentials?|auth(?:orization)?|(?<![A-Za-z])(?:pat|pwd|dsn))"
)
_OPTION = re.compile(rf"-{_NAME}", re.IGNORECASE)
_GIVEN = re.compile(
    rf"(?<![\w.-])({_NAME}\s*[=:]\s*)(?:(?:bearer|basic|token)\s+)?(\"[^\"]*\"|'[^']*'|[^\s'\"&;]+)",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"://[^/@\s]+@")
_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?([^/?#\s]+)([^\s'\"]*)")


def is_secret(name: str) -> bool:
    """True if the name of a variable suggests that its value is a secret."""
    return _SECRET.search(name) is not None


def strip_url_paths(text: str) -> str:
    """Return `text` with only the hosts of URLs, because the path of a webhook is secret."""
    return _ADDRESS.sub(
        lambda match: f"{match[1]}{match[2]}/…" if match[3] else f"{match[1]}{match[2]}", text
    )


def redact(text: str) -> str:
    """Return `text` without passwords in URLs and without values of keys and tokens."""
    return _GIVEN.sub(rf"\1{REDACTED_TEXT}", _PASSWORD.sub(f"://{REDACTED_TEXT}@", text))


def redact_args(args: Sequence[object]) -> list[str]:
    """Redact the words of a command; the value of an option may be the next argument."""
    shown: list[str] = []
    for argument in map(str, args):
        follows = bool(shown) and _OPTION.fullmatch(shown[-1]) is not None and not argument.startswith("-")
        shown.append(REDACTED_TEXT if follows else redact(argument))
    return shown


def redact_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the specification of a job without its secrets."""
    shown = {name: _redacted(value) for name, value in spec.items()}
    if isinstance(env := spec.get("env"), Mapping):
        shown["env"] = {
            str(name): REDACTED_TEXT if is_secret(str(name)) else _redacted(value)
            for name, value in env.items()
        }
    if isinstance(args := spec.get("args"), list):
        shown["args"] = redact_args(args)
    notify = spec.get("notify")
    if isinstance(notify, Mapping) and isinstance(targets := notify.get("targets"), list):
        shown["notify"] = {**notify, "targets": [redact(strip_url_paths(str(target))) for target in targets]}
    return shown


def redact_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an attempt's environment without its secrets."""
    shown = dict(environment)
    if isinstance(args := shown.get("args"), str):
        try:
            shown["args"] = shlex.join(redact_args(shlex.split(args)))
        except ValueError:  # not in the format written by hpctrain
            shown["args"] = redact(args)
    return shown


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    return [_redacted(item) for item in value] if isinstance(value, list) else value
