"""The newest measurements of a node in Prometheus' text format, for node_exporter's textfile collector.

The format is that of the Prometheus documentation, "Exposition formats", version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Escapes in the value of a label.
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def format_prometheus(run_id: str, line: Mapping[str, Any]) -> str:
    """Return a gauge for each number in a line of a node, and one per GPU for each list of numbers.

    Args:
        run_id: value of the label `run`.
        line: a line of `telemetry/node-NNN.jsonl`, in its units.
    """
    samples: list[str] = []
    for name, value in line.items():
        gauge = f"hpctrain_{name}"
        labels = {"run": run_id, "host": str(line["host"])}
        if isinstance(value, list):
            values = [(labels | {"gpu": str(gpu)}, each) for gpu, each in enumerate(value)]
        else:
            values = [(labels, value)] if name not in ("time", "seconds") else []
        numbers = [(labels, each) for labels, each in values if isinstance(each, int | float)]
        if numbers:
            samples += [
                f"# TYPE {gauge} gauge",
                *(f"{gauge}{_format(each)} {number}" for each, number in numbers),
            ]
    return "\n".join([*samples, ""])


def _format(labels: Mapping[str, str]) -> str:
    words = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{words}}}"
