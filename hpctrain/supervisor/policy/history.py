"""Summarize the history of a run, as far as the next decision depends on it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.record_types import Event

#: Longer attempts may have made progress: scripts may save without a record.
SHORT_ATTEMPT_S = 300.0

#: Rank and host at the beginning of a cause; the same failure may occur on another rank.
_RANK_PREFIX = re.compile(r"rank \d+ on \S+: ")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class PastFailure:
    kind: EndKind
    host: str | None = None
    """Node of the rank that failed first."""
    normalized_cause: str = ""


@dataclass
class History:
    """History of a run since the last submission by the user."""

    failures: list[PastFailure] = field(default_factory=list)
    crashes: list[EndKind] = field(default_factory=list)
    """Failures since the last checkpoint whose step is known."""
    stops: list[EndKind] = field(default_factory=list)
    """Consecutive stopped attempts that are known to have made no progress. See `shows_no_progress`."""
    slow_nodes: list[str] = field(default_factory=list)
    excluded: frozenset[str] = frozenset()
    agreed_to_stop: bool = False
    """True if the ranks of the newest attempt agreed to stop, so all checkpoints are recorded."""
    has_saved: bool = False
    """True if the newest attempt saved a new checkpoint, whose step is known."""
    memory: str | None = None
    micro_batch_size: int | None = None
    """Maximum size of micro-batches, because larger ones did not fit into GPU memory."""
    faulty_devices: list[str | None] = field(default_factory=list)
    """Devices that computed wrong results, once per detection; None if the device was not identified."""
    resume_limit: int | None = None
    """Last verified step, until the run has resumed after wrong results; None otherwise."""

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> History:
        """Compute the history from the run's events, oldest first.

        A successor job continues the counts; only a submission by the user resets them. A step saved twice is
        not a new checkpoint. The step of checkpoints written by the script itself is unknown until the script
        has loaded one; a step that is only assumed proves no checkpoint.
        """
        past, newest, progressed = cls(), 0, False
        for event in events:
            kind, step = event.kind, event.step
            # Copies of the state in memory are recorded only when a run resumes from one.
            is_loaded = kind == "resumed" and (event.checkpoint is not None or event.is_loaded is True)
            is_saved = kind == "checkpoint" or is_loaded
            is_new = is_saved and (step or 0) > newest
            if is_new or (kind == "checkpoint" and step is None):
                progressed = True
                past.failures.clear()
                past.stops.clear()
            if is_new:
                newest = step or 0
                past.crashes.clear()
            if kind in ("resumed", "checkpoint", "memory_copy"):
                past.resume_limit = None
            match kind:
                case "submitted" if event.is_new_submission:
                    past = cls(resume_limit=past.resume_limit)
                case "started":
                    past.agreed_to_stop = past.has_saved = False
                case "signal":
                    past.agreed_to_stop = True
                case "checkpoint":
                    past.has_saved |= is_new
                case "failure" if event.rank is not None:
                    past._add_failure(event)
                case "straggler" if event.lasting:
                    past.slow_nodes.append(str(event.host))
                case "excluded":
                    past.excluded |= set(event.hosts or ())
                case "requeue":
                    past.memory = event.memory or past.memory
                    end = _kind(event.end_kind, EndKind.PREEMPTED)
                    # The duration before a requeue by Slurm may be unknown.
                    unknown_s = math.inf if event.by == "slurm" else 0.0
                    duration_s = unknown_s if event.duration_s is None else event.duration_s
                    if not shows_no_progress(end, duration_s, agreed=past.agreed_to_stop):
                        past.stops.clear()
                    elif end.is_stop and not progressed:
                        past.stops.append(end)
                    progressed = False
        return past

    def _add_failure(self, event: Event) -> None:
        # Events of older versions have no class.
        kind = _kind(event.end_kind, EndKind.NOT_STARTED if event.rank == -1 else EndKind.KILLED)
        failure = PastFailure(kind, event.host, normalize_cause(str(event.cause)))
        self.failures.append(failure)
        self.crashes.append(kind)
        self.micro_batch_size = event.micro_batch_size or self.micro_batch_size
        if kind is EndKind.CORRUPTION:
            self.resume_limit = event.verified_step
            self.faulty_devices.append(event.device and f"{event.device} on {failure.host}")

    def consecutive_identical(self) -> int:
        causes = [(past.kind, past.normalized_cause) for past in reversed(self.failures)]
        return len([*takewhile(lambda cause: cause == causes[0], causes)])

    def count_by_node(self) -> Counter[tuple[str, EndKind]]:
        """Count the failures of each node by kind, and the detections of a slow node."""
        counts = Counter((past.host, past.kind) for past in self.failures if past.host is not None)
        return counts + Counter((host, EndKind.STRAGGLER) for host in self.slow_nodes)


def shows_no_progress(kind: EndKind, seconds: float, *, agreed: bool) -> bool:
    """Return true if an attempt of this duration without a new checkpoint certainly made no progress.

    In a long attempt, the script may have saved its own checkpoint, unless the ranks agreed to stop.
    """
    return seconds < SHORT_ATTEMPT_S or (agreed and kind is EndKind.TIME_LIMIT)


def normalize_cause(cause: str) -> str:
    """Remove the parts of a cause that differ between identical failures."""
    return _ADDRESS.sub("0x", _RANK_PREFIX.sub("", cause, count=1))


def _kind(name: object, otherwise: EndKind) -> EndKind:
    return EndKind(str(name)) if name in set(EndKind) else otherwise
