"""What a rank does when the job is told to stop.

A handler does nothing but note the signal: saving inside of it would run in the middle of any other code,
on some ranks and not on others. While nobody listens (start-up, imports, a script that knows only PyTorch)
there is nothing to save, and the rank leaves at once, asking to be continued.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from hpctrain.errors import EXIT_CONTINUE
from hpctrain.runtime.stop_notes import STOP_SIGNALS, settle_stop

#: Whoever was told to leave at once, and cleans up, has so long.
LEAVE_LIMIT_S = 15.0

_left_by: int | None = None
"""The signal at which this process was to leave at once."""


class LeftAtOnce(SystemExit):
    """This rank was told to stop while nobody listened, and leaves wherever it is; its peers may be ahead."""


class StopFlag:
    """Whether this rank was told to stop, by which signal, and when, on the monotonic clock."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.noted_at = 0.0

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: remember the first signal; a second one changes nothing."""
        if self.signal_name is None:
            self.noted_at = time.monotonic()
            self.signal_name = signal.Signals(number).name


@contextlib.contextmanager
def listen() -> Iterator[StopFlag]:
    """Note stop signals in the flag that is yielded, until the block ends.

    Python delivers signals to the main thread only; in another thread the flag is never set, which is
    said on stderr.
    """
    flag = StopFlag()
    if (number := _left_by) is not None:
        # The exception was swallowed by whatever it came into: the training is told instead.
        flag.note(number, None)
    if threading.current_thread() is not threading.main_thread():
        print("hpctrain: not in the main thread, so a stop signal cannot be noted here.", file=sys.stderr)
        yield flag
        return
    _mind_forks()
    previous = {number: signal.signal(number, flag.note) for number in STOP_SIGNALS}
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        settle_stop()


def leave_on_stop() -> None:
    """Until somebody listens, let a stop signal end this process with exit code 75."""
    _mind_forks()
    for number in STOP_SIGNALS:
        signal.signal(number, _leave)


def be_deaf_at_the_end() -> None:
    """Ignore stop signals once the interpreter takes itself apart, after all that the script does at exit.

    It takes the handlers away first; so a rank that has done everything would be ended by the signal, and
    pass for one that is to be continued.
    """

    def ignore() -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    # What is registered first is called last.
    atexit.register(ignore)


def is_leaving() -> bool:
    """Whether this process was told to leave at once, and nobody has listened since.

    What goes wrong then is a consequence: whatever swallows the exception, an import for instance, may fail
    of it in its own words.
    """
    return _left_by is not None and signal.getsignal(_left_by) is _leave


def _leave(number: int, _frame: FrameType | None) -> None:
    if signal.getsignal(number) is not _leave:
        return  # The script handles it, and tells its predecessor too: it knows when to leave.
    # Not print: the signal may have come in the middle of one.
    os.write(2, f"hpctrain: {signal.Signals(number).name} while nothing is training: leaving.\n".encode())
    global _left_by
    if _left_by is None:
        _left_by = number
        threading.Thread(target=_see_it_left, name="hpctrain-leaving", daemon=True).start()
    raise LeftAtOnce(EXIT_CONTINUE)


def _see_it_left() -> None:
    """End this process where it has not ended by itself.

    The exception comes into whatever runs: a finalizer or a callback, which Python lets swallow it, a module
    that is being imported, or a library's clean-up that waits for peers which have left.
    """
    time.sleep(LEAVE_LIMIT_S)
    if not is_leaving():
        return  # Somebody listens by now, and has been told.
    message = f"hpctrain: told to stop {LEAVE_LIMIT_S:.0f} s ago, and still here: leaving. It is here:\n"
    os.write(2, message.encode())
    faulthandler.dump_traceback(all_threads=True)
    os._exit(EXIT_CONTINUE)


@functools.cache
def _mind_forks() -> None:
    """From now on, let forked children be ended by SIGTERM, and be deaf to a time limit's announcement.

    A child is not the rank. With a handler of the rank's, it would ignore the SIGTERM by which a pool of
    processes ends its own, and the pool would wait for it for ever. A signal that comes at the very fork is
    held back until the child is ready for it: the interpreter would forget it.
    """
    held_back = threading.local()

    def before() -> None:
        held_back.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back.mask)

    def in_child() -> None:
        for number in STOP_SIGNALS:
            if _is_ours(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _is_ours(handler: object) -> bool:
    return handler is _leave or getattr(handler, "__func__", None) is StopFlag.note
