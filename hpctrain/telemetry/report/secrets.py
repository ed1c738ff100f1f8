"""What of a run's specification and surroundings may be shown to whoever gets its report."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "(not shown)"

#: Names of variables whose values are nobody's business.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth|(?:^|_)(?:pat|pwd|dsn)(?:_|$)", re.IGNORECASE)
#: The same at the end of a name in a text, where much else is a word: --max-tokens, --tokenizer.
_NAME = (
    r"[\w.-]*(?:key|token|secret|passw(?:or)?d|credentials?|auth(?:orization)?|(?<![A-Za-z])(?:pat|pwd|dsn))"
)
_OPTION = re.compile(rf"-+{_NAME}", re.IGNORECASE)
_GIVEN = re.compile(
    rf"({_NAME}\s*[=:]\s*)(?:(?:bearer|basic|token)\s+)?(\"[^\"]*\"|'[^']*'|[^\s'\"&;]+)", re.IGNORECASE
)
_PASSWORD = re.compile(r"([a-z][a-z0-9+.-]*://)[^/@\s]+@", re.IGNORECASE)
_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?([^/?#\s]+)([^\s'\"]*)")


def is_secret(name: str) -> bool:
    """Whether the variable of that name holds something that opens doors."""
    return _SECRET.search(name) is not None


def shortened(text: str) -> str:
    """A text with the hosts of its addresses only: what follows them is what opens a webhook."""
    return _ADDRESS.sub(
        lambda match: f"{match[1]}{match[2]}/…" if match[3] else f"{match[1]}{match[2]}", text
    )


def redacted(text: str) -> str:
    """A text without the passwords of its addresses, and without what it gives for keys and tokens."""
    return _GIVEN.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}@", text))


def redacted_args(args: Sequence[object]) -> list[str]:
    """The same of the words of a command, where the value of an option may be the next word."""
    shown: list[str] = []
    for word in map(str, args):
        follows = bool(shown) and _OPTION.fullmatch(shown[-1]) is not None and not word.startswith("-")
        shown.append(HIDDEN if follows else redacted(word))
    return shown


def without_secrets(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as it may be shown."""
    shown = {name: _redacted(value) for name, value in spec.items()}
    if isinstance(env := spec.get("env"), Mapping):
        shown["env"] = {
            str(name): HIDDEN if is_secret(str(name)) else _redacted(value) for name, value in env.items()
        }
    if isinstance(args := spec.get("args"), list):
        shown["args"] = redacted_args(args)
    notify = spec.get("notify")
    if isinstance(notify, Mapping) and isinstance(targets := notify.get("targets"), list):
        shown["notify"] = {**notify, "targets": [redacted(shortened(str(target))) for target in targets]}
    return shown


def surroundings_without_secrets(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What a start of the ranks ran on, as it may be shown."""
    shown = dict(environment)
    if isinstance(args := shown.get("args"), str):
        try:
            shown["args"] = shlex.join(redacted_args(shlex.split(args)))
        except ValueError:  # not as we write it
            shown["args"] = redacted(args)
    return shown


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    return [_redacted(one) for one in value] if isinstance(value, list) else value
