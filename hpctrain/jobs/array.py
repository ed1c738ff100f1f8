"""Job arrays: which tasks there are, in Slurm's notation."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpctrain.errors import SpecError

#: Each task has a folder of its own, which has to be there before the job is queued.
MOST_TASKS = 10_000
#: Task numbers are below Slurm's largest MaxArraySize (slurm.conf(5)).
_LARGEST_INDEX = 4_000_000

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?", re.ASCII)
_FORM = "Write it as in sbatch: 0-19, 1,3,5-7, 0-30:10, each with %4 behind it to run 4 at once"


class Array(NamedTuple):
    """The tasks of a job array."""

    indices: tuple[int, ...]
    """Numbers of the tasks, ascending."""
    throttle: int = 0
    """How many tasks may run at once; 0 for as many as there is room for."""

    @classmethod
    def parse(cls, text: str) -> Array:
        """Read sbatch's notation of `--array`, such as `0-19%4`.

        Raises:
            SpecError: it is none, or there are too many tasks.
        """
        listed, percent, limit = text.partition("%")
        if percent and not (limit.isascii() and limit.isdecimal() and int(limit) > 0):
            raise SpecError(f"--array {text!r} is no job array: {limit!r} after % is no number. {_FORM}.")
        indices: set[int] = set()
        for part in listed.split(","):
            indices.update(_indices(part, text))
            if len(indices) > MOST_TASKS:
                raise SpecError(
                    f"--array {text!r} has more than {MOST_TASKS} tasks, each of which has a folder of its "
                    "own. Submit it in several arrays."
                )
        return cls(tuple(sorted(indices)), int(limit or 0))


def _indices(part: str, text: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        raise SpecError(f"--array {text!r} is no job array: {part!r} is no range of numbers. {_FORM}.")
    first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
    if last < first or step < 1:
        raise SpecError(f"--array {text!r} is no job array: the range {part!r} is empty. {_FORM}.")
    if last > _LARGEST_INDEX:
        raise SpecError(f"--array {text!r} has task {last}, but Slurm counts to {_LARGEST_INDEX} at most.")
    return range(first, last + 1, step)
