"""Plain values as YAML, without the library, which takes longer to import than the rest of a submission."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: JSON is YAML but for these: YAML does not take every character as it is, nor pairs of surrogates for one.
_NOT_PLAIN = re.compile(r"[^ -~]")


def to_yaml(values: Mapping[str, Any]) -> str:
    """A mapping as YAML in ASCII: a line for each entry, and for each entry of a mapping in it.

    Args:
        values: names that need no quotes, each with a text, a number, a truth value, None, or a list or
            mapping of these.
    """
    return "".join(f"{name}:{_below(value)}\n" for name, value in values.items())


def _below(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return "".join(f"\n  {_inline(name)}: {_inline(entry)}" for name, entry in value.items())
    return f" {_inline(value)}"


def _inline(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if isinstance(value, float) and "." not in text:
        # To YAML a number without a point is a float only in this form.
        text = text.replace("e", ".0e")
    return _NOT_PLAIN.sub(lambda match: f"\\U{ord(match[0]):08x}", text)
