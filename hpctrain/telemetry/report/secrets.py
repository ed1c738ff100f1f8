"""What a page that is passed on must not tell: passwords, keys, and addresses whose path is one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(not shown)"

#: Names of variables whose values are nobody's business.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?([^/?#\s]+)([^\s'\"]*)")


def is_secret(name: str) -> bool:
    """Whether the variable of that name holds something that opens doors."""
    return _SECRET.search(name) is not None


def shortened(text: str) -> str:
    """A text with the hosts of its addresses only: what follows them is what opens a webhook."""
    return _ADDRESS.sub(
        lambda match: f"{match[1]}{match[2]}/…" if match[3] else f"{match[1]}{match[2]}", text
    )


def without_secrets(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as it may be shown."""
    shown = dict(spec)
    if isinstance(env := spec.get("env"), Mapping):
        shown["env"] = {str(name): HIDDEN if is_secret(str(name)) else value for name, value in env.items()}
    notify = spec.get("notify")
    if isinstance(notify, Mapping) and isinstance(targets := notify.get("targets"), list):
        shown["notify"] = {**notify, "targets": [shortened(str(target)) for target in targets]}
    return shown
