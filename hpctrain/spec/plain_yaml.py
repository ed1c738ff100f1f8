"""A YAML writer for plain values. The YAML library takes longer to import than the rest of a submission."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: JSON is YAML except for these: YAML does not take every character literally, nor surrogate pairs.
_NOT_PLAIN = re.compile(r"[^ -~]")


def to_yaml(values: Mapping[str, Any]) -> str:
    """Format a mapping as ASCII YAML, with one line per entry and per entry of a nested mapping.

    Args:
        values: names that need no quotes, each with a text, number, boolean, None, or a list or mapping of
            these.
    """
    return "".join(f"{name}:{_below(value)}\n" for name, value in values.items())


def _below(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "".join(f"\n  {_inline(name)}: {_inline(entry)}" for name, entry in value.items())
    return f" {_inline(value)}"


def _inline(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, float) and "." not in text:
        # YAML reads a number without a decimal point as a float only in this form.
        text = text.replace("e", ".0e")
    return _NOT_PLAIN.sub(lambda match: f"\\U{ord(match[0]):08x}", text)
