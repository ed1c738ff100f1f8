"""Notes of the signals that tell this rank to stop, whoever handles them.

A script that knows nothing of hpctrain may handle them itself, and then leave with exit code 0 in the middle
of its training. So the interpreter notes each signal, by its own means (`signal.set_wakeup_fd`), and what the
exit code of a rank means depends on whether there was one. Only asyncio's handlers take these means for
themselves.

Besides, a script's handler may never return: Lightning's exchanges something with the other ranks, which may
be in another exchange and wait for this one. A rank that does not get out of that is ended here.
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
from types import CodeType
from typing import NoReturn

from hpctrain.errors import EXIT_CONTINUE

#: Preemption is announced by SIGTERM, the time limit by SIGUSR2 (NCCL uses SIGUSR1).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

#: A handler that has waited for other ranks for so long, at the very same place, does not come back.
STUCK_S = 30.0
LOOK_EVERY_S = 5.0


class _Notes:
    """Signals that came, in their order."""

    def __init__(self) -> None:
        """Have the interpreter note signals from now on. Only the main thread may."""
        self._reading, writing = os.pipe()
        for end in (self._reading, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # A child that is ended by SIGTERM, as a pool of processes ends its own, is not this rank.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        self._lock = threading.Lock()
        self._told: list[signal.Signals] = []

    def told(self) -> signal.Signals | None:
        """The first stop signal that is not settled."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                numbers = os.read(self._reading, 4096)
                self._told += [signal.Signals(number) for number in numbers if number in STOP_SIGNALS]
            return self._told[0] if self._told else None

    def settle(self) -> None:
        """Forget the signals so far."""
        self.told()
        with self._lock:
            self._told.clear()

    def wait(self) -> None:
        """Wait for any signal; it may have been there before."""
        select.select([self._reading], [], [])


_notes: _Notes | None = None


def note_stops() -> None:
    """Note stop signals from now on, and end this process where a script's handler of one is stuck."""
    global _notes
    _notes = _Notes()
    threading.Thread(target=_watch, args=(_notes,), name="hpctrain-stop-notes", daemon=True).start()


def told_to_stop() -> signal.Signals | None:
    """The first stop signal since `note_stops` or the last `settle_stop`; None where there was none."""
    return _notes.told() if _notes else None


def settle_stop() -> None:
    """Forget the stop signals so far: whoever heard them has done what was to be done."""
    if _notes:
        _notes.settle()


def _watch(notes: _Notes) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while True:
        notes.wait()
        place, since = None, time.monotonic()
        while (told := notes.told()) is not None:
            if (now := _place_in_handler(main, told)) is None or now != place:
                place, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_S:
                _leave_stuck(told)
            time.sleep(LOOK_EVERY_S)


def _place_in_handler(thread: int, number: signal.Signals) -> tuple[int, int] | None:
    """The instruction at which `thread` waits for other ranks in the handler of `number`; None elsewhere."""
    innermost = frame = sys._current_frames().get(thread)
    if innermost is None or not str(innermost.f_globals.get("__name__")).startswith("torch.distributed"):
        return None
    code = _code_of(signal.getsignal(number))
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return (id(innermost), innermost.f_lasti) if frame is not None else None


def _code_of(handler: object) -> CodeType | None:
    """The code that runs when `handler` is called, where it is Python's: a function, a method, an object."""
    call = handler if hasattr(handler, "__code__") else getattr(handler, "__call__")  # noqa: B004, B009
    code = getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _leave_stuck(number: signal.Signals) -> NoReturn:
    print(
        f"hpctrain: the script's own handler of {number.name} has waited for other ranks "
        f"for {STUCK_S:.0f} s: leaving. It waits here:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CONTINUE)
