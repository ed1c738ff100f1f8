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
    is_set = (row for row in rows if row["value"] is not None or row["default"] is not None)
    echo_table([("option", "value", "source"), *(_cells(row) for row in is_set)])


def _rows(settings: ResolvedOptions) -> list[dict[str, Any]]:
    """Return the rows in order. The row of an unset option has the default as text, and no value."""
    rows = []
    for name, option in all_options().items():
        default = option.default or None
        keys = sorted(key for key in settings.values if key == name or key.startswith(f"{name}."))
        for key in keys:
            # In a file, options of sbatch need no prefix.
            short_key = key.removeprefix("sbatch.").replace("-", "_")
            setting = settings.values[key]
            source = setting.source
            rows.append(
                {
                    "option": short_key if short_key in sbatch_options() else key,
                    "value": setting.value,
                    "default": default,
                    "source": source.words or "file",
                    "file": str(source.path) if source.path else None,
                    "line": source.line or None,
                    "profile": source.profile,
                }
            )
        if not keys:
            row = dict.fromkeys(("value", "file", "line", "profile"))
            rows.append({"option": name, "default": default, "source": "default", **row})
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    value, source = row["value"], str(row["source"])
    if value is None:
        text = f"({row['default']})"
    else:
        text = value if isinstance(value, str) and value.isprintable() and value else json.dumps(value)
    if row["file"] is not None:
        profile = f" (profile {row['profile']})" if row["profile"] else ""
        source = f"{short_path(row['file'])}:{row['line']}{profile}"
    return row["option"], text, source
