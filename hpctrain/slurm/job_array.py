"""Parse the task indices of job arrays in Slurm's notation."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpctrain.errors import SpecError
from hpctrain.text import is_count

#: Each task needs a run folder before the job is queued.
MAX_TASKS = 10_000
#: Task indices are below Slurm's largest MaxArraySize (slurm.conf(5)).
_MAX_INDEX = 4_000_000

_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::(\d{1,18}))?)?", re.ASCII)
_FORM = "Examples: 0-19; 1,3,5-7; 0-30:10; 0-19%4 (at most 4 concurrent tasks)"


class JobArray(NamedTuple):
    indices: tuple[int, ...]
    """Task indices, ascending."""
    throttle: int = 0
    """Maximum number of concurrent tasks; 0 means no maximum."""

    @classmethod
    def parse(cls, text: str) -> JobArray:
        """Parse sbatch's `--array` notation, such as `0-19%4`."""
        listed, percent, limit = text.partition("%")
        if percent and not (is_count(limit) and int(limit) > 0):
            raise SpecError(
                f"--array {text!r} is invalid: {limit!r} after % is not a positive number. {_FORM}."
            )
        indices: set[int] = set()
        for item in listed.split(","):
            added = _indices(item, text)
            if len(added) <= MAX_TASKS:
                indices.update(added)
            if max(len(indices), len(added)) > MAX_TASKS:
                raise SpecError(
                    f"--array {text!r} has more than {MAX_TASKS} tasks. Submit several smaller arrays."
                )
        return cls(tuple(sorted(indices)), int(limit or 0))


def _indices(item: str, text: str) -> range:
    match = _PART.fullmatch(item)
    if match is None:
        raise SpecError(f"--array {text!r} is invalid: {item!r} is neither a number nor a range. {_FORM}.")
    start, end, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if end < start or step < 1:
        problem = "is empty" if step else "has a step of 0"
        raise SpecError(f"--array {text!r} is invalid: the range {item!r} {problem}. {_FORM}.")
    if end > _MAX_INDEX:
        raise SpecError(
            f"--array {text!r} contains task {end}, but Slurm's highest task number is {_MAX_INDEX}."
        )
    return range(start, end + 1, step)
