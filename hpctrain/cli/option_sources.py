"""Show the source of each option's value (`hpctrain submit --show-config`)."""

from __future__ import annotations

import json
from typing import Any

from hpctrain.cli.common import echo_json, echo_table, short_path
from hpctrain.jobs.options.resolved_options import ResolvedOptions
from hpctrain.jobs.options.table import all_options, sbatch_options


def print_option_sources(settings: ResolvedOptions, *, as_json: bool) -> None:
    """Print one row per option, or per entry of an option with several entries."""
    rows = _rows(settings)
    if as_json:
        echo_json(rows)
        return
    lines = [("option", "value", "source")]
    lines += [(row["option"], _written(row), _place(row)) for row in rows if _is_set(row)]
    echo_table(lines)


def _rows(settings: ResolvedOptions) -> list[dict[str, Any]]:
    """Return the rows in order. The row of an unset option has the default as text, and no value."""
    rows = []
    for name, option in all_options().items():
        keys = [key for key in settings.values if key == name or key.startswith(f"{name}.")]
        for key in sorted(keys):
            given = settings.values[key]
            rows.append(
                {
                    "option": _name(key),
                    "value": given.value,
                    "default": option.default or None,
                    "source": given.source.words or "file",
                    "file": str(given.source.path) if given.source.path else None,
                    "line": given.source.line or None,
                    "profile": given.source.profile,
                }
            )
        if not keys:
            row = dict.fromkeys(("value", "file", "line", "profile"))
            rows.append({"option": name, "default": option.default or None, "source": "default", **row})
    return rows


def _name(key: str) -> str:
    """Return the key as in a file, where options of sbatch need no prefix."""
    name = key.removeprefix("sbatch.").replace("-", "_")
    return name if name in sbatch_options() else key


def _is_set(row: dict[str, Any]) -> bool:
    return row["value"] is not None or row["default"] is not None


def _written(row: dict[str, Any]) -> str:
    value = row["value"]
    if value is None:
        return f"({row['default']})"
    return value if isinstance(value, str) and value.isprintable() and value else json.dumps(value)


def _place(row: dict[str, Any]) -> str:
    if row["file"] is None:
        return str(row["source"])
    section = f" (profile {row['profile']})" if row["profile"] else ""
    return f"{short_path(row['file'])}:{row['line']}{section}"
