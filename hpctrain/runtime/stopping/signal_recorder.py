"""Record the stop signals of this rank, independent of their handlers.

A script without hpctrain may handle signals itself, and exit with code 0 during its training. The interpreter
therefore records each signal (`signal.set_wakeup_fd`), which determines the meaning of the rank's exit code.

A script's handler may also hang: Lightning's handler communicates with the other ranks, which may be in
another collective. This module ends such a rank (docs/adr/0014-exit-from-deadlocked-signal-handlers.md).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.rundir import CANCEL_GRACE_KEY, STOP_GRACE_VARIABLE

#: SIGTERM announces preemption, SIGUSR2 the time limit (NCCL uses SIGUSR1).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

#: A failure after this time, and after the signal's grace time with this margin, is not part of the stop.
STOP_TIMEOUT_S, STOP_MARGIN_S = 300.0, 60.0

#: A handler is stuck if it has waited for other ranks at the same instruction for this time.
STUCK_HANDLER_TIMEOUT_S = 30.0
HANDLER_POLL_S = 1.0


def read_stop_grace(environ: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds after each signal; the variable is, for example, `SIGTERM=30,SIGUSR2=120`."""
    text = environ.get(STOP_GRACE_VARIABLE, "")
    try:
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        grace = {name.strip(): float(seconds) for name, _, seconds in pairs}
    except ValueError:
        raise UserError(
            f"{STOP_GRACE_VARIABLE} is {text!r}, but must list signals with grace times in seconds, for "
            "example SIGTERM=30,SIGUSR2=120."
        ) from None
    return {CANCEL_GRACE_KEY: grace[signal.SIGTERM.name], **grace} if signal.SIGTERM.name in grace else grace


class _SignalRecord:
    def __init__(self) -> None:
        """Start to record signals, in the main thread."""
        self.pipe, writing = os.pipe()
        for end in (self.pipe, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A signal to a child, such as the SIGTERM of a process pool, does not affect this rank.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._lock = threading.Lock()
        self._stop_signals: list[signal.Signals] = []
        self.received_at = 0.0
        """Time of the last stop signal, on the monotonic clock."""
        self.report: Callable[[signal.Signals], None] | None = None

    def first_stop_signal(self) -> signal.Signals | None:
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(self.pipe, 4096)
                if new := [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]:
                    self._stop_signals += new
                    self.received_at = time.monotonic()
            return self._stop_signals[0] if self._stop_signals else None

    def clear(self) -> None:
        self.first_stop_signal()
        with self._lock:
            self._stop_signals.clear()


_record: _SignalRecord | None = None


def start_signal_recorder(leave_in_time: Callable[[signal.Signals, float], None]) -> None:
    """Record stop signals; after one, a thread repeatedly calls `leave_in_time` with signal and seconds."""
    global _record
    _record = _SignalRecord()
    arguments = (_record, leave_in_time)
    threading.Thread(target=_watch, args=arguments, name="hpctrain-stop-notes", daemon=True).start()


def pending_stop_signal() -> signal.Signals | None:
    """Return the first stop signal since the last `clear_stop_signals`, if any."""
    return _record.first_stop_signal() if _record else None


def is_failure_part_of_stop(environ: Mapping[str, str]) -> bool:
    """True if a stop signal is pending whose grace time may not be over. A script may save and continue."""
    if (number := pending_stop_signal()) is None or _record is None:
        return False
    grace_s = 0.0
    with contextlib.suppress(UserError):
        grace_s = read_stop_grace(environ).get(number.name, 0.0)
    return time.monotonic() - _record.received_at < max(STOP_TIMEOUT_S, grace_s + STOP_MARGIN_S)


def report_stop_signal(report: Callable[[signal.Signals], None]) -> None:
    """Report the first stop signal as soon as it arrives: the script's reaction may end this process."""
    if _record:
        _record.report = report
        if (number := pending_stop_signal()) is not None:
            report(number)


def wait_for_stop_signal(timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while pending_stop_signal() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def clear_stop_signals() -> None:
    """Forget the stop signals so far, after they have been handled."""
    if _record:
        _record.clear()


def _watch(record: _SignalRecord, leave_in_time: Callable[[signal.Signals, float], None]) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    while True:
        select.select([record.pipe], [], [])
        number = record.first_stop_signal()
        if number is not None and record.report is not None:
            with contextlib.suppress(OSError):  # The supervisor has exited.
                record.report(number)
        instruction: tuple[int, int] | None = None
        num_polls, since = 0, time.monotonic()
        while (number := record.first_stop_signal()) is not None:
            previous, instruction = instruction, _handler_instruction(main_thread, number)
            if instruction is None or instruction != previous:
                num_polls = 0
            elif num_polls * HANDLER_POLL_S >= STUCK_HANDLER_TIMEOUT_S:
                report_stacks(
                    f"the script's {number.name} handler has been waiting for other ranks for "
                    f"{STUCK_HANDLER_TIMEOUT_S:.0f} s, so this rank exits"
                )
                os._exit(EXIT_CONTINUE)
            leave_in_time(number, time.monotonic() - since)
            time.sleep(HANDLER_POLL_S)
            num_polls += 1  # a pause of this process counts as one


def report_stacks(reason: str) -> None:
    """Print why this rank exits, and the stacks of all threads, which may hold the lock of `print`."""
    with contextlib.suppress(OSError):  # such as a full disk
        os.write(2, f"hpctrain: {reason}. Stacks of all threads:\n".encode())
    faulthandler.dump_traceback(all_threads=True)


def _handler_instruction(thread: int, number: signal.Signals) -> tuple[int, int] | None:
    """Return the instruction at which `thread` waits for other ranks in the handler of `number`, or None."""
    innermost = frame = sys._current_frames().get(thread)
    if innermost is None or not str(innermost.f_globals.get("__name__")).startswith("torch.distributed"):
        return None
    handler = signal.getsignal(number)
    call = handler if hasattr(handler, "__code__") else getattr(type(handler), "__call__", None)  # noqa: B004
    code = getattr(call, "__code__", None)
    if code is None:
        return None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return (id(innermost), innermost.f_lasti) if frame is not None else None
