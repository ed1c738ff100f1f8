"""Where a run's time went, over all its attempts: every microsecond is counted once. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpctrain.telemetry.book import SPENT, Book, Piece
from hpctrain.telemetry.marks import microseconds, read_marks
from hpctrain.telemetry.spans import Span, What

NO_STEPS = (
    "No step was logged: all time between a start of the ranks and their end counts as training, or as lost "
    "where they failed and nothing was saved."
)


@dataclass(frozen=True)
class Ledger:
    """Where a run's time went."""

    spans: tuple[Span, ...] = ()
    """Without a gap, from the first sign of the run to the last."""
    lost_steps: int = 0
    """How many steps were trained in vain, each counted as often as it was."""
    measured: frozenset[What] = frozenset(What) - frozenset(SPENT.values())
    """What the run has told apart; the rest is not known and lies in training."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how sure the figures are."""

    @classmethod
    def of(
        cls,
        events: Iterable[Mapping[str, Any]],
        metrics: Iterable[Mapping[str, Any]] = (),
        *,
        until: float | None = None,
        waits: bool = False,
    ) -> Ledger:
        """Read what a run has written down.

        Args:
            events: lines of `events.jsonl`, as they stand there.
            metrics: lines of `metrics.jsonl`, as they stand there.
            until: now, in seconds since the epoch, of a run that goes on; None ends with the last record.
            waits: whether the run is in the queue, as the scheduler says.
        """
        events = list(events)
        marks, saves = read_marks(events, metrics)
        if not marks:
            return cls()
        now_us = microseconds(until)
        end_us = marks[-1].time_us if now_us is None else now_us
        logs_steps = any(mark.kind in ("step", "resumed") for mark in marks)
        kept = [event.get("attempt") for event in events if event.get("kind") == "checkpoint"]
        book = Book(marks[0], end_us, saves, logs_steps=logs_steps, kept=kept)
        for mark in marks:
            book.take(mark)
        book.close(waits=waits)
        measured = cls.measured | book.measured
        return cls(tuple(_joined(book.pieces)), book.lost_steps, measured, () if logs_steps else (NO_STEPS,))

    @property
    def wall_us(self) -> int:
        """All of the run's time, in microseconds."""
        return self.spans[-1].end_us - self.spans[0].start_us if self.spans else 0

    @cached_property
    def totals_us(self) -> dict[What, int]:
        """Microseconds of each kind; they add up to `wall_us`."""
        totals = dict.fromkeys(What, 0)
        for span in self.spans:
            totals[span.what] += span.end_us - span.start_us
        return totals


def _joined(pieces: Iterable[Piece]) -> Iterator[Span]:
    """Neighbours of one kind and attempt as one."""
    span: Span | None = None
    for piece in sorted(pieces, key=lambda piece: piece.start_us):
        if piece.start_us == piece.end_us:
            continue
        if span is not None and (span.what, span.attempt) == (piece.what, piece.attempt):
            span = Span(span.start_us, piece.end_us, span.what, span.attempt)
            continue
        if span is not None:
            yield span
        span = Span(piece.start_us, piece.end_us, piece.what, piece.attempt)
    if span is not None:
        yield span
