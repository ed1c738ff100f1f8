"""Results of a benchmark: printed as a table, and written as JSON for `make bench`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """A measured figure."""

    name: str
    value: float
    unit: str = "×"
    lowest: float | None = None
    highest: float | None = None
    limit: float | None = None
    at_least: bool = False
    """If true, `limit` is a lower limit."""
    headline: bool = False
    """If true, the page shows the result in its first table."""

    @property
    def is_met(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def format_range(self) -> str:
        if self.lowest is None or self.highest is None:
            return ""
        return f"{format_figure(self.lowest)} to {format_figure(self.highest)}"

    def format_limit(self) -> str:
        if self.limit is None:
            return ""
        bound = "at least " if self.at_least else ""
        return f"{bound}{format_figure(self.limit)}{'' if self.is_met else ' (not met)'}"


def format_figure(value: float) -> str:
    """Format a number with three significant digits."""
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class Results:
    """Command line and results of a benchmark. Exits with 1 if a result exceeds its limit."""

    def __init__(self, doc: str) -> None:
        self.parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--json", type=Path, help="file for the results")
        self.parser.add_argument(
            "--no-limits", action="store_true", help="exit with 0 despite exceeded limits"
        )
        self._results: list[Result] = []

    def parse(self) -> argparse.Namespace:
        self._options = self.parser.parse_args()
        return self._options

    def add(
        self,
        name: str,
        measured: float | Sequence[float],
        unit: str = "×",
        *,
        limit: float | None = None,
        at_least: bool = False,
        headline: bool = False,
    ) -> float:
        """Add a figure, or the median of several and their range. Returns the figure."""
        several = list(measured) if isinstance(measured, Sequence) else [measured]
        value = float(statistics.median(several))
        span = (min(several), max(several)) if len(several) > 1 else (None, None)
        self._results.append(Result(name, value, unit, *span, limit, at_least, headline))
        return value

    def finish(self) -> None:
        """Print the results, write them, and exit."""
        width = max(len(result.name) for result in self._results)
        for result in self._results:
            figure, limit = format_figure(result.value), result.format_limit()
            limit = limit and f"limit: {limit}"
            print(f"{result.name:{width}}  {figure:>8} {result.unit:12} {result.format_range():20} {limit}")
        if self._options.json is not None:
            results = [asdict(result) for result in self._results]
            self._options.json.write_text(json.dumps(results, indent=1) + "\n")
        met = self._options.no_limits or all(result.is_met for result in self._results)
        sys.exit(0 if met else 1)
