"""Going through what a run has written down, moment after moment: no time is left out or told twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.telemetry.marks import TURNS, Mark, Save
from hpctrain.telemetry.spans import What

#: Time in which steps are trained: lost where these have to be trained again.
_WORK = frozenset({What.TRAINING, What.COMMUNICATING, What.DATA, What.VALIDATING, What.SAVING})
#: What the field `spent` of a line of metrics may tell apart; the rest of its time is training.
SPENT = {"data": What.DATA, "communication": What.COMMUNICATING, "validation": What.VALIDATING}
#: Events that come between the end of an attempt's work and the next one's start.
_GOES_ON = frozenset({"restart", "shrink", "replace", "requeue", "started"})


@dataclass(slots=True)
class Piece:
    """A span that may still turn out to be lost: steps `first` + 1 to `last` were trained in it."""

    start_us: int
    end_us: int
    what: What
    attempt: int | None
    first: int
    last: int


class Book:
    """Walks through the marks and writes down pieces, without a gap."""

    def __init__(
        self,
        first: Mark,
        end_us: int,
        saves: Iterable[Save],
        *,
        logs_steps: bool,
        kept: Container[int | None],
    ) -> None:
        """Begin at the first mark.

        Args:
            first: it.
            end_us: where the account ends.
            saves: times in which saves held up the training.
            logs_steps: whether the run tells of its steps.
            kept: starts of the ranks of which something was saved.
        """
        self.pieces: list[Piece] = []
        self.lost_steps = 0
        self.measured: set[What] = set()
        self._now = min(first.time_us - first.spent_us.get("all", 0), end_us)
        self._end, self._logs_steps, self._kept = end_us, logs_steps, kept
        self._saves = deque(saves)
        #: Work that counts so far; its steps ascend.
        self._counting: list[Piece] = []
        self._attempt: int | None = None
        self._step = 0
        self._first_logged: int | None = None
        #: What the time is spent on until something happens; None while the ranks work.
        self._phase: What | None = What.IDLE
        #: Whether the ranks have ended, and it is not known yet what follows.
        self._left = False
        #: Whether no step of the attempt was heard of.
        self._fresh = True

    def take(self, mark: Mark) -> None:
        """Account for the time up to a mark."""
        if mark.kind not in ("submitted", "started") and (
            self._attempt is None or mark.attempt > self._attempt
        ):
            # A training that nobody supervises notes no start.
            self._fill(mark.time_us - mark.spent_us.get("all", 0), What.IDLE)
            self._start(mark)
        if mark.kind == "resumed":
            self._resumed(mark)
        elif mark.kind in TURNS:
            self._turned(mark)
        elif mark.attempt == self._attempt and not self._left:
            self._trained(mark)

    def close(self, *, waits: bool) -> None:
        """Account for the rest."""
        if waits:
            self._phase = What.QUEUED
        elif self._left:
            self._phase = What.IDLE
        self._fill(self._end, self._phase or What.TRAINING)

    def _start(self, mark: Mark) -> None:
        self._attempt, self._step, self._left, self._fresh = mark.attempt, 0, False, True
        self._phase = What.STARTING if self._logs_steps else None

    def _resumed(self, mark: Mark) -> None:
        """A state was loaded: what was trained after it is trained again."""
        self._fill(mark.time_us - mark.spent_us.get("loading", 0), self._phase or What.STARTING)
        self._fill(mark.time_us, What.LOADING)
        self._step, self._phase = mark.step or 0, None
        self._lose(self._step)

    def _trained(self, mark: Mark) -> None:
        """Steps were trained since the mark before, or a checkpoint tells that they were."""
        assert mark.step is not None
        if self._fresh and mark.kind == "checkpoint" and mark.step == self._step:
            return
        if self._phase is not None:
            self._step = self._entered_at(mark.step)
            self._lose(self._step)
        if self._fresh:
            # Without a word of when the steps began, those of ranks that loaded began with that.
            begun = mark.time_us - mark.spent_us.get("all", 0 if self._phase else mark.time_us)
            self._fill(begun, What.STARTING)
            self._phase, self._fresh = None, False
        spent = {what: mark.spent_us[name] for name, what in SPENT.items() if name in mark.spent_us}
        self.measured.update(spent)
        first, self._step = self._step, max(self._step, mark.step)
        if mark.kind == "step" or self._step > first:
            self._work(mark.time_us, spent, first, self._step)

    def _entered_at(self, step: int) -> int:
        """After which step an attempt began that loaded nothing that it told of, by its first logged one."""
        if self._first_logged is None:
            self._first_logged = step
        done = self._counting[-1].last if self._counting else 0
        return 0 if step <= self._first_logged else min(done, step - 1)

    def _turned(self, mark: Mark) -> None:
        kind = mark.kind
        if self._left:
            what = What.RESTARTING if kind in _GOES_ON else What.IDLE
        elif self._phase not in (None, What.STARTING):
            what = self._phase or What.IDLE
        elif kind in ("started", "submitted"):
            # The job was killed without a word, at or after its last sign of life.
            what = What.QUEUED if kind == "started" else What.IDLE
        elif self._phase is not None:
            what = self._phase
        elif not self._logs_steps:
            in_vain = kind == "failure" and self._attempt not in self._kept
            what = What.LOST if in_vain else What.TRAINING
        elif kind == "signal":
            what = What.SAVING if mark.saved else What.TRAINING
        else:
            # Ranks that fail lose the step that they were in.
            what = {"failure": What.LOST, "finished": What.IDLE}.get(kind, What.RESTARTING)
        self._fill(mark.time_us, what)
        self._left = kind in ("failure", "signal")
        match kind:
            case "started":
                self._start(mark)
            case "restart" | "shrink" | "replace":
                self._phase = What.RESTARTING
            case "requeue" | "submitted":
                self._phase = What.QUEUED
            case "finished":
                self._phase = What.IDLE

    def _fill(self, until_us: int, what: What) -> None:
        """Account for the time until then, apart from what saves took of it."""
        for start_us, end_us, save in self._segments(until_us):
            self._add(start_us, end_us, what if save is None else What.SAVING, save)

    def _work(self, until_us: int, spent: Mapping[What, int], first: int, last: int) -> None:
        """Divide the time until then, apart from what saves took of it, among what the ranks did."""
        segments = list(self._segments(until_us))
        left = sum(end - start for start, end, save in segments if save is None)
        before: list[tuple[What, int]] = []
        after: list[tuple[What, int]] = []
        for what in SPENT.values():
            us = min(left, spent.get(what, 0))
            (after if what is What.VALIDATING else before).append((what, us))
            left -= us
        portions = deque([*before, (What.TRAINING, left), *after])
        for start, end_us, save in segments:
            if save is not None:
                self._add(start, end_us, What.SAVING, save)
                continue
            while start < end_us:
                what, us = portions.popleft()
                taken = min(us, end_us - start)
                if taken < us:
                    portions.appendleft((what, us - taken))
                if taken:
                    piece = self._add(start, start + taken, what)
                    piece.first, piece.last = first, last
                start += taken

    def _segments(self, until_us: int) -> Iterator[tuple[int, int, Save | None]]:
        """Cut the time until then at the saves in it, and go there."""
        until_us = min(until_us, self._end)
        while self._saves and self._saves[0].start_us < until_us and self._now < until_us:
            save = self._saves[0]
            start_us, end_us = max(save.start_us, self._now), min(save.end_us, until_us)
            if self._now < start_us:
                yield self._now, start_us, None
                self._now = start_us
            if start_us < end_us:
                yield start_us, end_us, save
                self._now = end_us
            if save.end_us > until_us:
                break
            self._saves.popleft()
        if self._now < until_us:
            yield self._now, until_us, None
            self._now = until_us

    def _add(self, start_us: int, end_us: int, what: What, save: Save | None = None) -> Piece:
        step = self._step if save is None else save.step
        piece = Piece(start_us, end_us, what, self._attempt, step, step)
        self.pieces.append(piece)
        if what in _WORK:
            self._counting.append(piece)
        return piece

    def _lose(self, step: int) -> None:
        """All work after `step` has been in vain; of a piece that holds it, the part that lies after it."""
        kept: list[Piece] = []
        if self._counting:
            self.lost_steps += max(0, self._counting[-1].last - step)
        while self._counting and (piece := self._counting[-1]).last > step:
            self._counting.pop()
            if piece.first < step:
                share = (piece.end_us - piece.start_us) * (step - piece.first)
                cut_us = piece.start_us + share // (piece.last - piece.first)
                self.pieces.append(Piece(cut_us, piece.end_us, What.LOST, piece.attempt, step, piece.last))
                piece.end_us, piece.last = cut_us, step
                kept.append(piece)
            else:
                piece.what = What.LOST
        self._counting += reversed(kept)
