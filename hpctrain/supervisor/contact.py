"""What the supervisor hears from the ranks of an attempt, and what follows: a hang, a straggler."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.supervisor.liveness import Limits, Liveness, Overdue, Told, absent
from hpctrain.supervisor.step import Emit, Hung, Step, Straggling, Unended
from hpctrain.supervisor.stragglers import LASTING, Slow, Spent, Stragglers

log = logging.getLogger(__name__)

#: A rank tells where it is at once, and writes it down within a moment, unless the file system hangs.
_TELL_LIMIT_S = 10.0
#: Those that do not answer are asked by a signal; what they print is in their logs by then.
_SIGNAL_PAUSE_S = 2.0
#: Whoever did not get to look for so long was suspended, and the ranks probably with him.
_PAUSE_S = 10.0
#: When the last rank has left, the end of the step is known within seconds, unless the word of it was lost.
_END_LIMIT_S = 60.0


@dataclass
class _Inquiry:
    """The ranks of a hung attempt are asked where they are."""

    overdue: Overdue
    since: float
    told: dict[int, Told] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    signalled_at: float | None = None


class Contact:
    """Hears the ranks of one attempt. See `Listener`; only `close` is called from elsewhere."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        step: Step,
        ask: Callable[[], int],
        emit: Emit,
        limits: Limits,
        host_of: Callable[[int], str],
        world_size: int,
    ) -> None:
        """Begin to hear.

        Args:
            run: the run.
            attempt: the start of the ranks.
            step: their step.
            ask: asks all ranks where they are; tells how many were reached.
            emit: takes events.
            limits: when a rank takes too long; they learn.
            host_of: where a rank is.
            world_size: the number of ranks.
        """
        self._run, self._attempt, self._step = run, attempt, step
        self._ask, self._emit, self._host_of, self._world_size = ask, emit, host_of, world_size
        self._liveness, self._stragglers = Liveness(limits), Stragglers(world_size)
        self._inquiry: _Inquiry | None = None
        self._is_over = False
        self._empty_since: float | None = None
        self._looked_at = time.monotonic()
        self._modules: dict[int, list[str]] = {}
        self._changed: set[str] = set()
        self._named: set[int] = set()

    def hear(self, rank: int, message: Mapping[str, Any]) -> None:
        """A rank says something of itself."""
        self._liveness.alive(rank, time.monotonic())
        if "beats" in message:
            self._empty_since = None
            phase, step = str(message["phase"]), int(message["step"])
            self._liveness.heard(rank, phase, step, int(message["beats"]), time.monotonic())
            data_s, compute_s, exchange_s = map(float, message["spent"])
            self._stragglers.heard(rank, Spent(step, data_s, compute_s, exchange_s))
            self._modules[rank] = [str(name) for name in message["modules"]]
            self._changed.update(map(str, message["changed"]))
        elif self._inquiry is not None and "told" in message:
            self._inquiry.told[rank] = Told(**message["told"])
        elif self._inquiry is not None and "written" in message:
            self._inquiry.written.add(rank)

    def hung_up(self, rank: int) -> None:
        """A rank is gone."""
        self._liveness.gone(rank)
        self._empty_since = None if self._liveness.ranks else time.monotonic()

    @property
    def modules(self) -> list[str] | None:
        """What all ranks have imported that takes long; None while not all have imported PyTorch."""
        if len(self._modules) < self._world_size:
            return None
        first, *others = self._modules.values()
        common = [name for name in first if all(name in other for other in others)]
        return common if "torch" in common else None

    @property
    def changed(self) -> list[str]:
        """Variables of the environment that the script has changed on some rank."""
        return sorted(self._changed)

    def look(self) -> None:
        """Time has passed."""
        now = time.monotonic()
        if (paused := now - self._looked_at) > _PAUSE_S:
            self._liveness.paused(paused)
        self._looked_at = now
        if self._is_over:
            return
        if self._empty_since is not None and now - self._empty_since > _END_LIMIT_S:
            self._empty_since = now
            # Slurm may take its time, and nobody else would hear the ranks meanwhile.
            threading.Thread(target=self._look_for_the_end, daemon=True).start()
        if self._inquiry is not None:
            self._inquire(self._inquiry, now)
        elif (overdue := self._liveness.overdue(now)) is not None:
            log.warning(
                "no rank has got anything done for %.0f s (limit %.0f s): asking all of them where they are",
                overdue.seconds,
                overdue.limit_s,
            )
            self._inquiry = _Inquiry(overdue, now)
            self._ask()
        else:
            self._name_stragglers(now)

    def close(self) -> None:
        """The attempt is over."""
        self._is_over = True

    def _inquire(self, inquiry: _Inquiry, now: float) -> None:
        there = self._liveness.ranks.keys()
        waited = now - inquiry.since
        if inquiry.signalled_at is not None:
            if now - inquiry.signalled_at >= _SIGNAL_PAUSE_S:
                self._conclude(inquiry)
        elif there <= inquiry.written:
            self._conclude(inquiry)
        elif waited >= _TELL_LIMIT_S:
            if there <= inquiry.told.keys():
                self._conclude(inquiry)
                return
            log.warning("%s do not answer: asking by SIGQUIT", _ranks(sorted(there - inquiry.told.keys())))
            inquiry.signalled_at = now
            # Slurm may take its time, and nobody else would hear the ranks meanwhile.
            threading.Thread(target=self._signal, daemon=True).start()

    def _look_for_the_end(self) -> None:
        """A launcher that was never told of the end of its step would be waited for, for ever."""
        try:
            if not self._step.is_over() or self._is_over:
                return
        except SchedulerError as error:
            log.warning("whether the step is over cannot be told: %s", error)
            return
        self._emit(Unended())

    def _signal(self) -> None:
        try:
            self._step.signal(signal.SIGQUIT)
        except SchedulerError as error:
            log.warning("the ranks cannot be asked by a signal: %s", error)

    def _conclude(self, inquiry: _Inquiry) -> None:
        self._is_over = True
        silent = sorted(self._liveness.ranks.keys() - inquiry.told.keys())
        missing = absent(inquiry.told, silent)
        cause = in_words(inquiry.overdue, inquiry.told, silent, missing, self._host_of)
        rank = (missing or sorted(self._liveness.ranks) or [0])[0]
        self._emit(Hung(cause, rank, self._host_of(rank), tuple(missing)))

    def _name_stragglers(self, now: float) -> None:
        for slow, times in self._stragglers.look(now):
            # The first time it is news; after that every so many windows it is said that it is so still.
            lasting = times % LASTING == 0
            if not lasting and slow.rank in self._named:
                continue
            self._named.add(slow.rank)
            host = self._host_of(slow.rank)
            self._record(slow, host, lasting=lasting)
            self._emit(Straggling(host, slow.rank, round(slow.ratio, 2), slow.part, lasting))

    def _record(self, slow: Slow, host: str, *, lasting: bool) -> None:
        def parts(spent: Spent) -> dict[str, float]:
            return {
                "data": round(spent.data_s, 6),
                "compute": round(spent.compute_s, 6),
                "exchange": round(spent.exchange_s, 6),
            }

        log.warning(
            "rank %d on %s takes %.1f times as long as most (%s)%s",
            slow.rank,
            host,
            slow.ratio,
            slow.part,
            ", and stays so" if lasting else "",
        )
        self._run.log_event(
            "straggler",
            self._attempt,
            rank=slow.rank,
            host=host,
            ratio=round(slow.ratio, 2),
            part=slow.part,
            lasting=lasting,
            seconds=parts(slow.own),
            typical=parts(slow.typical),
        )


def in_words(
    overdue: Overdue,
    told: Mapping[int, Told],
    silent: Sequence[int],
    missing: Sequence[int],
    host_of: Callable[[int], str],
) -> str:
    """What a hang was, in one sentence."""
    text = f"hung: no rank got anything done for {overdue.seconds:.0f} s (limit {overdue.limit_s:.0f} s)"
    if not missing:
        places = ", ".join(sorted({one.place for one in told.values()})) or "nobody says where"
        return f"{text}; which rank the others wait for cannot be told: {places}"
    first = missing[0]
    where = f"rank {first} on {host_of(first)}"
    if first in silent:
        text += f"; {where} does not answer"
    else:
        one = told[first]
        text += f"; {where} is in {one.place}, phase {one.phase}, after {one.step} steps"
    if len(missing) > 1:
        text += f", and with it {_ranks(missing[1:])}"
    others = [one for rank, one in told.items() if rank not in missing]
    if others:
        most = max((one.place for one in others), key=[one.place for one in others].count)
        text += f", while {len(others)} of {len(told) + len(silent)} ranks wait in {most}"
    return text


def _ranks(ranks: Sequence[int]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{more}"
