"""What follows when the ranks of a run end, by the kind of their end: the rows that a user may change.

The table stands in docs/restart-policy.md, which a test holds against this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from hpctrain.errors import SpecError

#: Stops soon after a start, without a new checkpoint, after which a run is taken to get nowhere.
_STOPS = 10
#: Restarts after faults of machines: each of them costs a node, and there are only so many.
_MACHINES = 10


class Kind(StrEnum):
    """How an attempt ended, and why."""

    DONE = "done"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    REQUESTED = "requested"
    PYTHON = "python"
    USER_ERROR = "user-error"
    OOM = "oom"
    GPU_OOM = "gpu-oom"
    KILLED = "killed"
    SIGNAL = "signal"
    NCCL = "nccl"
    GPU = "gpu"
    HANG = "hang"
    STRAGGLER = "straggler"
    NODE_LOST = "node-lost"
    NODE_CHECK = "node-check"
    NOT_STARTED = "not-started"
    OUT_OF_TIME = "out-of-time"

    @property
    def is_stop(self) -> bool:
        """Whether the ranks left because they were told to."""
        return self in (Kind.PREEMPTED, Kind.TIME_LIMIT, Kind.REQUESTED)


@dataclass(frozen=True)
class Row:
    """What a kind of end is good for. All counts are of ends with no new checkpoint between them."""

    retries: int | None = None
    """Starts that follow; None: the kind shares `--max-failures` with the others of which that is so."""
    repeats: int | None = None
    """Starts that follow the very same failure, in the same words; None for as many as `retries`."""
    exclude: int = 0
    """Failures on one node after which that node is left out; 0 for never."""


DEFAULTS: Mapping[Kind, Row] = {
    Kind.PREEMPTED: Row(retries=_STOPS),
    Kind.TIME_LIMIT: Row(retries=_STOPS),
    Kind.REQUESTED: Row(retries=_STOPS),
    Kind.PYTHON: Row(repeats=1),
    Kind.USER_ERROR: Row(retries=0),
    Kind.OOM: Row(retries=1),
    Kind.GPU_OOM: Row(retries=1),
    Kind.KILLED: Row(exclude=2),
    Kind.SIGNAL: Row(exclude=2),
    Kind.NCCL: Row(exclude=2),
    Kind.GPU: Row(retries=_MACHINES, exclude=1),
    Kind.HANG: Row(exclude=2),
    Kind.STRAGGLER: Row(retries=_MACHINES, exclude=2),
    Kind.NODE_LOST: Row(retries=_MACHINES),
    Kind.NODE_CHECK: Row(retries=_MACHINES, exclude=1),
    Kind.NOT_STARTED: Row(),
    Kind.OUT_OF_TIME: Row(retries=0),
}

_FIELDS = tuple(entry.name for entry in fields(Row))


@dataclass(frozen=True)
class Policy:
    """The whole table, as it holds for a run."""

    rows: Mapping[Kind, Row]
    max_failures: int
    """Failures of all kinds that share it, with no new checkpoint between them, that end the run."""

    @classmethod
    def of(cls, changes: Mapping[str, Mapping[str, int]], max_failures: int) -> Policy:
        """The table with what the user changed.

        Raises:
            SpecError: there is no such row or field, or a number is out of its range.
        """
        rows = dict(DEFAULTS)
        for name, values in changes.items():
            kind = _kind(name)
            for field, value in values.items():
                _check(name, field, value)
            rows[kind] = replace(rows[kind], **values)
        return cls(rows, max_failures)

    def without_exclusions(self) -> Policy:
        """The table where all nodes are one machine."""
        return replace(self, rows={kind: replace(row, exclude=0) for kind, row in self.rows.items()})

    def __getitem__(self, kind: Kind) -> Row:
        return self.rows[kind]


def read_changes(texts: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """The changes out of an option's entries, such as `oom.retries` with `0`.

    Raises:
        SpecError: an entry is none of the form KIND.FIELD=NUMBER.
    """
    changes: dict[str, dict[str, int]] = {}
    for key, text in texts.items():
        kind, _, field = key.partition(".")
        if not (text.isascii() and text.isdecimal()):
            raise SpecError(
                f"restart.{key} is {text!r} (--restart), but it takes a whole number. "
                "Give KIND.FIELD=NUMBER, such as oom.retries=0."
            )
        _check(kind, field, int(text))
        changes.setdefault(str(_kind(kind)), {})[field] = int(text)
    return changes


def _kind(name: str) -> Kind:
    if name in set(DEFAULTS):
        return Kind(name)
    raise SpecError(f"There is no kind of end {name!r} (--restart). There are {', '.join(DEFAULTS)}.")


def _check(kind: str, field: str, value: object) -> None:
    if field not in _FIELDS:
        raise SpecError(
            f"restart.{kind} has no field {field!r} (--restart). There are {', '.join(_FIELDS)}; "
            f"give them as in {kind}.retries=0."
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError(f"restart.{kind}.{field} is {value!r} (--restart), but it takes 0 or more.")
