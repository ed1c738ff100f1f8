"""What matters of a run's past when it is decided what to do next."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.restart import Kind

#: An attempt that lasted longer than this may have got somewhere: a script may save without our knowing.
SHORT_ATTEMPT_S = 300.0

#: At the head of a cause: which rank it was, and where. Another one may fail of the same.
_WHO = re.compile(r"rank \d+ on \S+: ")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Past:
    """A failure of before."""

    kind: Kind
    host: str | None = None
    """The node of the rank that failed first."""
    words: str = ""
    """What it was, in words that are the same for the same failure."""


@dataclass(frozen=True)
class History:
    """What matters of a run's past, counted since the user submitted it."""

    failures: tuple[Past, ...] = ()
    """Failures since the newest checkpoint, oldest first."""
    crashes: tuple[Kind, ...] = ()
    """Failures since the last checkpoint of which the step is known."""
    stops: tuple[Kind, ...] = ()
    """Short attempts in a row that ended with a stop, with no new checkpoint between them."""
    slow: tuple[str, ...] = ()
    """Nodes that were found to hold up the others, once for each time."""
    excluded: frozenset[str] = frozenset()
    """Nodes that are left out."""
    has_checkpoint: bool = False
    """Whether there has ever been anything to go on from."""

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> History:
        """Count over the run's events, oldest first.

        A successor job goes on with the counts; only a submission by the user starts them anew.
        A step saved a second time is no new checkpoint. Of a script's own checkpoints the step is not known.
        """
        failures: list[Past] = []
        crashes: list[Kind] = []
        stops: list[Kind] = []
        slow: list[str] = []
        excluded: set[str] = set()
        newest, saved = 0, False
        for event in events:
            match event.get("kind"):
                case "submitted" if "after" not in event:
                    for count in (failures, crashes, stops, slow, excluded):
                        count.clear()
                case "checkpoint":
                    saved = True
                    if event["step"] is None or event["step"] > newest:
                        failures.clear()
                        stops.clear()
                    if event["step"] is not None and event["step"] > newest:
                        newest = event["step"]
                        crashes.clear()
                case "resumed":
                    saved = True
                case "failure" if event.get("rank") is not None:
                    past = _past(event)
                    failures.append(past)
                    crashes.append(past.kind)
                case "straggler" if event.get("lasting", True):
                    slow.append(str(event.get("host")))
                case "excluded":
                    excluded.update(event["hosts"])
                case "requeue" if event.get("seconds", 0.0) < SHORT_ATTEMPT_S:
                    if (kind := _kind(event.get("class"), Kind.PREEMPTED)).is_stop:
                        stops.append(kind)
                case "requeue":
                    stops.clear()
        return cls(tuple(failures), tuple(crashes), tuple(stops), tuple(slow), frozenset(excluded), saved)

    def num_alike(self) -> int:
        """How many failures in a row, up to the last one, were the very same."""
        count = 0
        for past in reversed(self.failures):
            if (past.kind, past.words) != (self.failures[-1].kind, self.failures[-1].words):
                break
            count += 1
        return count

    def num_on(self) -> Counter[tuple[str, Kind]]:
        """How many failures of a kind each node has had, and how often it was slow."""
        counts = Counter((past.host, past.kind) for past in self.failures if past.host is not None)
        return counts + Counter((host, Kind.STRAGGLER) for host in self.slow)


def _past(event: Mapping[str, Any]) -> Past:
    # Events of an older version have no class.
    kind = _kind(event.get("class"), Kind.NOT_STARTED if event["rank"] == -1 else Kind.KILLED)
    return Past(kind, event.get("host"), words_of(str(event.get("cause"))))


def words_of(cause: str) -> str:
    """A cause without what differs between two failures that are the same."""
    return _ADDRESS.sub("0x", _WHO.sub("", cause, count=1))


def _kind(name: object, otherwise: Kind) -> Kind:
    return Kind(str(name)) if name in set(Kind) else otherwise
