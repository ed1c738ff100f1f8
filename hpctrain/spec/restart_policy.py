"""Restart policy by kind of end: a table with rows that users may change.

docs/restart-policy.md shows the same table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from hpctrain.errors import SpecError
from hpctrain.text import is_count

#: Number of early stops without a new checkpoint after which the run counts as stuck.
_STOPS = 10
#: Restarts at the time limit: attempts have the maximum length, so two more without a checkpoint are
#: sufficient.
_TIME_LIMITS = 2
#: Attempts after a lack of memory, each with more memory or smaller micro-batches.
_MEMORY = 3
#: Restarts after hardware faults: each fault excludes a node, and nodes are limited.
_MACHINES = 10


class EndKind(StrEnum):
    """The end of an attempt, by kind and cause."""

    DONE = "done"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    REQUESTED = "requested"
    PYTHON = "python"
    USER_ERROR = "user-error"
    UNFINISHED = "unfinished"
    OOM = "oom"
    GPU_OOM = "gpu-oom"
    KILLED = "killed"
    SIGNAL = "signal"
    NCCL = "nccl"
    UNAUTHENTICATED = "unauthenticated"
    GPU = "gpu"
    CORRUPTION = "corruption"
    HANG = "hang"
    STRAGGLER = "straggler"
    NODE_LOST = "node-lost"
    NODE_CHECK = "node-check"
    NOT_STARTED = "not-started"
    DISK_FULL = "disk-full"
    OUT_OF_TIME = "out-of-time"

    @property
    def is_stop(self) -> bool:
        """True if the ranks exited on request."""
        return self in (EndKind.PREEMPTED, EndKind.TIME_LIMIT, EndKind.REQUESTED)


@dataclass(frozen=True)
class RestartRule:
    """Limits for a kind of end. All limits count ends without a new checkpoint in between."""

    retries: int | None = None
    """Maximum number of restarts; None shares `--max-failures` with all other such kinds."""
    repeats: int | None = None
    """Restarts after failures with an identical message; None means `retries`."""
    exclude: int = 0
    """Failures on a node after which it is excluded; 0 means never."""


DEFAULT_RULES: Mapping[EndKind, RestartRule] = {
    EndKind.PREEMPTED: RestartRule(retries=_STOPS),
    EndKind.TIME_LIMIT: RestartRule(retries=_TIME_LIMITS),
    EndKind.REQUESTED: RestartRule(retries=_STOPS),
    EndKind.PYTHON: RestartRule(repeats=1),
    EndKind.USER_ERROR: RestartRule(retries=0),
    EndKind.UNFINISHED: RestartRule(retries=0),
    EndKind.OOM: RestartRule(retries=_MEMORY),
    EndKind.GPU_OOM: RestartRule(retries=_MEMORY),
    EndKind.KILLED: RestartRule(exclude=2),
    EndKind.SIGNAL: RestartRule(exclude=2),
    EndKind.NCCL: RestartRule(exclude=2),
    EndKind.UNAUTHENTICATED: RestartRule(exclude=2),
    EndKind.GPU: RestartRule(retries=_MACHINES, exclude=1),
    EndKind.CORRUPTION: RestartRule(retries=_MACHINES, exclude=1),
    EndKind.HANG: RestartRule(exclude=2),
    EndKind.STRAGGLER: RestartRule(retries=_MACHINES, exclude=2),
    EndKind.NODE_LOST: RestartRule(retries=_MACHINES),
    EndKind.NODE_CHECK: RestartRule(retries=_MACHINES, exclude=1),
    EndKind.NOT_STARTED: RestartRule(),
    EndKind.DISK_FULL: RestartRule(retries=0),
    EndKind.OUT_OF_TIME: RestartRule(retries=0),
}

_FIELDS = tuple(entry.name for entry in fields(RestartRule))
_FORM = f"Use KIND.FIELD=NUMBER, as in oom.retries=0. FIELD is one of {', '.join(_FIELDS)}."


@dataclass(frozen=True)
class RestartPolicy:
    """The complete restart policy of a run."""

    rules: Mapping[EndKind, RestartRule]
    max_failures: int
    """Consecutive failures without a new checkpoint that end the run, for all kinds that share the limit."""

    @classmethod
    def with_changes(cls, changes: Mapping[str, Mapping[str, int]], max_failures: int) -> RestartPolicy:
        """Return the default policy with the user's changes.

        Raises:
            SpecError: a kind or field is unknown, or a number is out of range.
        """
        rules = dict(DEFAULT_RULES)
        for name, values in changes.items():
            kind = _kind(name)
            for field, value in values.items():
                _check(name, field, value)
            rules[kind] = replace(rules[kind], **values)
        return cls(rules, max_failures)

    def without_exclusions(self) -> RestartPolicy:
        """Return the policy without node exclusions, for a run on a single machine."""
        return replace(self, rules={kind: replace(rule, exclude=0) for kind, rule in self.rules.items()})

    def __getitem__(self, kind: EndKind) -> RestartRule:
        return self.rules[kind]


def parse_rule_changes(texts: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Parse the entries of the option, such as `oom.retries` with the value `0`.

    Raises:
        SpecError: an entry is not of the form KIND.FIELD=NUMBER.
    """
    changes: dict[str, dict[str, int]] = {}
    for key, text in texts.items():
        kind, _, field = key.partition(".")
        if not is_count(text):
            raise SpecError(
                f"--restart-policy {key} is {text!r}, but must be an integer of at least 0. {_FORM}"
            )
        known = str(_kind(kind))
        _check(kind, field, int(text))
        changes.setdefault(known, {})[field] = int(text)
    return changes


def _kind(name: str) -> EndKind:
    if name in set(DEFAULT_RULES):
        return EndKind(name)
    raise SpecError(
        f"Unknown kind {name!r} (--restart-policy). Valid kinds: {', '.join(DEFAULT_RULES)}. {_FORM}"
    )


def _check(kind: str, field: str, value: object) -> None:
    if field not in _FIELDS:
        problem = f"has no field {field!r}" if field else "is missing a field"
        raise SpecError(f"--restart-policy {kind} {problem}. {_FORM}")
    if type(value) is not int or value < 0:
        raise SpecError(f"--restart-policy {kind}.{field} is {value!r}, but must be 0 or more.")
