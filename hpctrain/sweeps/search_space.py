"""Parse the search space of a sweep, and list or draw its trials."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.slurm.job_array import MAX_TASKS

#: Values of a trial by hyper-parameter, as they are passed to the script.
TrialValues = dict[str, str]

_NAME = re.compile(r"[A-Za-z_][\w./@-]*")
_RANGE = re.compile(r"(-?\d{1,18}):(-?\d{1,18})(?::(-?\d{1,18}))?", re.ASCII)
_BOUNDS = re.compile(r"(log:)?([^.].*?)\.\.(.+)", re.DOTALL)
_FORMS = "Examples: lr=1e-4,3e-4; seed=0:5 (0 to 4); lr=log:1e-5..1e-1 (with --random); name=@values.txt"


@dataclass(frozen=True)
class ValueRange:
    """A continuous or integer range, whose values only a sampler can choose."""

    low: float
    high: float
    is_log: bool = False
    is_integer: bool = False

    def draw(self, generator: random.Random) -> str:
        """Return a uniform sample; uniform in the logarithm if `is_log`."""
        if self.is_integer and not self.is_log:
            return str(generator.randint(int(self.low), int(self.high)))
        if not self.is_log:
            return f"{generator.uniform(self.low, self.high):.6g}"
        value = math.exp(generator.uniform(math.log(self.low), math.log(self.high)))
        return str(round(value)) if self.is_integer else f"{value:.6g}"


Values = Sequence[str] | ValueRange
SearchSpace = Mapping[str, Values]


def parse_space(texts: Mapping[str, str | Sequence[str]], folder: Path) -> dict[str, Values]:
    space: dict[str, Values] = {}
    for name, text in texts.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is not a valid hyper-parameter name (--over). {_FORMS}.")
        values = _parse(name, text, folder) if isinstance(text, str) else list(map(str, text))
        if not isinstance(values, ValueRange):
            values = list(dict.fromkeys(values))
            if not values or "" in values:
                raise UserError(f"--over {name}={text!r} has an empty value. {_FORMS}.")
        space[name] = values
    return space


def inline_files(texts: Mapping[str, str | list[str]], folder: Path) -> dict[str, str | list[str]]:
    """Replace each `@FILE` by the file's values, because the file may change during the sweep."""
    named = {name: text for name, text in texts.items() if isinstance(text, str) and text.startswith("@")}
    return {**texts, **{name: list(values) for name, values in parse_space(named, folder).items()}}  # type: ignore[arg-type]


def _parse(name: str, text: str, folder: Path) -> Values:
    if text.startswith("@"):
        path = folder / text[1:]
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, ValueError) as error:  # A path with a NUL is a ValueError.
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"Cannot read the values of {name} from {str(path)!r} (--over): {reason}."
            ) from error
        return [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if match := _RANGE.fullmatch(text):
        step = int(match[3] or 1)
        numbers = range(int(match[1]), int(match[2]), step) if step else range(0)
        if not 0 < len(numbers) <= MAX_TASKS:
            raise UserError(
                f"--over {name}={text} has {len(numbers)} values, but must have 1 to {MAX_TASKS}. {_FORMS}."
            )
        return list(map(str, numbers))
    if (match := _BOUNDS.fullmatch(text)) is None:
        return [value.strip() for value in text.split(",")]
    is_log = match[1] is not None
    try:
        low, high = float(match[2]), float(match[3])
    except ValueError:
        raise UserError(f"--over {name}={text}: the bounds must be numbers. {_FORMS}.") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high) or (is_log and low <= 0):
        prefix = "positive, and " if is_log else ""
        raise UserError(f"--over {name}={text}: the bounds must be {prefix}in ascending order. {_FORMS}.")
    is_integer = all(re.fullmatch(r"-?\d+", bound) for bound in (match[2], match[3]))
    return ValueRange(low, high, is_log, is_integer)


def grid(space: SearchSpace) -> list[TrialValues]:
    """Return all combinations of the values; the last hyper-parameter varies fastest."""
    lists = [values for values in space.values() if not isinstance(values, ValueRange)]
    if ranges := [name for name, values in space.items() if isinstance(values, ValueRange)]:
        raise UserError(
            f"{ranges[0]} is a range (--over), so a grid search cannot list its values. Add --random N, or "
            "list the values."
        )
    if (number := math.prod(map(len, lists))) > MAX_TASKS:
        raise UserError(
            f"The grid has {number} trials (--over), but a sweep can have at most {MAX_TASKS}. Use fewer "
            "values, or --random N."
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def draw_trials(space: SearchSpace, numbers: Iterable[int], seed: int) -> list[TrialValues]:
    return [
        {
            name: values.draw(generator) if isinstance(values, ValueRange) else generator.choice(values)
            for name, values in space.items()
        }
        for generator in (random.Random(f"{seed}:{number}") for number in numbers)
    ]
