"""Write the steps and the time breakdown of a script without the Trainer to `metrics.jsonl`."""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hpctrain.record_types import Event, StepRecord
from hpctrain.records.buffered_writer import BufferedLineWriter
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, event_record
from hpctrain.runtime.exit_hooks import call_at_exit
from hpctrain.runtime.rank_activity import activity, count_ranks
from hpctrain.runtime.unfinished_training import has_started

#: Maximum wait for a write of another thread, which must not delay the exit of the rank.
_WRITE_LIMIT_S = 1.0


class StepLog:
    """Writes a line for the steps since the last line. Only rank 0 of an attempt has a log.

    Steps are counted from the state that the optimizer has loaded. If the state has no number of steps, such
    as for SGD, the attempt is assumed to continue after the last recorded step. Of several programs that a
    batch script runs at once, only the first has its steps recorded.
    """

    def __init__(self, run: RunDir, attempt: int, world_size: int, num_nodes: int) -> None:
        self._run, self._attempt, self._world_size, self._num_nodes = run, attempt, world_size, num_nodes
        self._metrics = BufferedLineWriter(run.metrics, _print)
        self._first_step: int | None = None
        """Number of steps before this attempt; None until its first step."""
        self._written = 0
        self._is_recorded: bool | None = None
        self._since = 0.0
        self._data_s = self._exchange_s = 0.0
        self._writing = threading.Lock()
        call_at_exit(self.write)

    def write(self) -> None:
        """Write a line, unless another write hangs, or was interrupted by the handler that calls this."""
        if self._writing.acquire(timeout=_WRITE_LIMIT_S):
            try:
                self._write()
            finally:
                self._writing.release()

    def _write(self) -> None:
        step, now = activity.optimizer_steps, time.perf_counter()
        if activity.ignored is not None:
            with suppress(OSError):
                self._report_ignored(activity.ignored)
        if activity.logs_metrics or has_started() or step == self._written or self._is_recorded is False:
            return
        first_step: int | None = None
        if self._first_step is None:
            try:
                self._is_recorded = self._is_first_program()
                if not self._is_recorded:
                    self._record_ranks(None)
                    return
                # The time of the steps in the first line is unknown.
                self._first_step, self._since = self._begin(), now
                self._record_ranks(count_ranks(self._world_size))
            except OSError:
                return  # another attempt follows
            self._data_s, self._exchange_s = activity.data_s, activity.exchange_s
            first_step = self._first_step + 1
        spent = {"all": now - self._since, "data": activity.data_s - self._data_s}
        # DDP communicates in the backward pass, in which the wait cannot be observed.
        if (exchange_s := activity.exchange_s - self._exchange_s) > 0:
            spent["communication"] = exchange_s
        spent = {name: round(seconds, 6) for name, seconds in spent.items()}
        place = self._first_step + step, time.time(), self._attempt
        self._metrics.append(StepRecord(*place, spent=spent, first_step=first_step).line())
        self._written, self._since = step, now
        self._data_s, self._exchange_s = activity.data_s, activity.exchange_s

    def _report_ignored(self, ignored: Sequence[Any]) -> None:
        """Record the user's changes that have no effect. At other restarts, the values only have advanced."""
        activity.ignored = None
        for event in read_last_records(self._run.events, Event):
            if event.is_new_submission:
                break
            if event.kind == "started" and event.attempt != self._attempt:
                return
        records = [value.record for value in ignored]
        record = {"time": time.time(), "attempt": self._attempt, "ignored": records}
        BufferedLineWriter(self._run.environment, _print).append(record)
        for value in ignored:
            _print(f"hpctrain: {value} To change it in a resumed run, set it after load_state_dict().")

    def _is_first_program(self) -> bool:
        # Of this process alone, and until its end; other locks would be inherited by its data workers.
        try:
            fd = os.open(self._run.log_index(self._attempt, 0), os.O_WRONLY | os.O_CREAT, 0o644)
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # such as a file system without locks
            pass
        return True

    def _record_ranks(self, num_ranks: int | None) -> None:
        """Record the number of ranks that train, None if unknown, unless the supervisor has started them."""
        events = read_last_records(self._run.events, Event)
        started = next((event.world_size for event in events if event.kind == "started"), None)
        if num_ranks is None or num_ranks != started:
            nodes = self._num_nodes if num_ranks == self._world_size else None
            record = event_record("ranks", self._attempt, world_size=num_ranks, nodes=nodes)
            BufferedLineWriter(self._run.events, _print).append(record)

    def _begin(self) -> int:
        """Return the number of steps before this attempt, and record this number if a state was loaded."""
        restored = activity.restored_steps
        is_loaded = bool(restored)
        for event in self._run.read_events():
            if event.kind == "resumed" and event.attempt == self._attempt:
                return restored or event.step or 0  # recorded by a plugin
        if restored is None:
            newest = next(read_last_records(self._run.metrics, StepRecord), None)
            restored = newest.step if newest is not None else 0
        if restored:
            record = event_record("resumed", self._attempt, step=restored, is_loaded=is_loaded)
            BufferedLineWriter(self._run.events, _print).append(record)
        return restored


def _print(message: str) -> None:
    print(message, file=sys.stderr)
