"""React to stop signals in a rank.

A handler only records the signal: saving in a handler would interrupt arbitrary code, at different points on
different ranks. While no code captures signals (start-up, imports, a script of plain PyTorch), the rank exits
immediately with a request for continuation.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hpctrain.checkpoint.listing import newest_script_checkpoint
from hpctrain.cluster import detect
from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.record_types import RankPhase
from hpctrain.rundir import ATTEMPT_VARIABLE, CHECKPOINTS_VARIABLE, RUN_DIR_VARIABLE, RunDir, attempt_of
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.release_devices import release_devices, release_devices_within
from hpctrain.runtime.stopping.agreed_stop import agreed_stop, agreement_timeout_s
from hpctrain.runtime.stopping.signal_recorder import (
    STOP_SIGNALS,
    clear_stop_signals,
    pending_stop_signal,
    read_stop_grace,
    report_stacks,
)
from hpctrain.runtime.unfinished_training import has_started
from hpctrain.text import format_duration

#: Time limit for the clean-up of a process that exits on a signal.
EXIT_TIMEOUT_S = 15.0
#: Time for the script to end after a stop signal that came too late to stop the training.
LATE_SIGNAL_TIMEOUT_S = 5.0

#: Time between the exit of a rank that does not stop by itself and the end of the grace time: this time, or
#: this fraction of the grace time, if shorter.
LEAVE_MARGIN_S, _LEAVE_SHARE = 10.0, 0.2

#: Modules that start workers, by way of multiprocessing.
_LOADER_MODULES = ("torch.utils.data.", "torchdata.")

#: A stop signal that came too late to stop a training, until it takes effect.
_late_signal: signal.Signals | None = None
#: The signal that caused the exit of this process.
_exit_signal: int | None = None


class StoppedBeforeTraining(SystemExit):
    """Exit on a stop signal that no code captured, at an arbitrary point; peers may be ahead."""


class StopFlag:
    """The first stop signal of this rank, if any, and its time on the monotonic clock."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self.received_at = 0.0
        self.may_leave = True
        """False if this process also has to save, or to wait for other processes."""

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    def record(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler that records the first signal; further signals are ignored."""
        if self.signal_name is None:
            self.received_at = time.monotonic()
            self.signal_name = signal.Signals(number).name


@contextlib.contextmanager
def capture_stop_signals(*, repeats_late: bool = False) -> Iterator[StopFlag]:
    """Record stop signals in the yielded flag until the block ends.

    With `repeats_late`, a signal that did not stop the block takes effect at the next such block, or a few
    seconds later. A script that ends in the meantime is complete.
    """
    global _late_signal
    flag = StopFlag()
    # An exit signal whose exception the interrupted code swallowed stops the training instead.
    if (number := _exit_signal or _late_signal) is not None:
        flag.record(number, None)
        _late_signal = None
    if threading.current_thread() is not threading.main_thread():
        # Python delivers signals only to the main thread.
        print(
            "hpctrain: training does not run in the main thread, so it cannot receive stop signals. Start "
            "training in the main thread.",
            file=sys.stderr,
        )
        yield flag
        return
    _install_fork_hooks()
    previous = {number: signal.signal(number, flag.record) for number in STOP_SIGNALS}
    try:
        yield flag
        if repeats_late and flag.signal_name is not None:
            _late_signal = signal.Signals[flag.signal_name]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        clear_stop_signals()
    if _late_signal is not None and handles_stop_signals():
        threading.Thread(target=_repeat_late_signal, args=(_late_signal,), daemon=True).start()


def exit_on_stop_signal() -> None:
    """Exit with code 75 on a stop signal, until other code captures signals."""
    _install_fork_hooks()
    # The functions that are registered first are called last: after the clean-up of the script.
    atexit.register(_release_after_stop)
    for number in STOP_SIGNALS:
        signal.signal(number, _exit_for_signal)


def handles_stop_signals() -> bool:
    """True if a stop signal ends this process because no code captures signals."""
    return all(signal.getsignal(number) is _exit_for_signal for number in STOP_SIGNALS)


def ignore_signals_at_exit() -> None:
    """Ignore stop signals when the interpreter shuts down, after the script's own exit handlers."""
    # The interpreter removes handlers: a signal would end a finished rank, which would then be continued. The
    # functions that are registered first are called last.
    for number in STOP_SIGNALS:
        atexit.register(signal.signal, number, signal.SIG_IGN)


def is_exiting() -> bool:
    """True if a signal caused the exit of this process, so that later errors are consequences."""
    return _exit_signal is not None and signal.getsignal(_exit_signal) is _exit_for_signal


def _exit_for_signal(number: int, _frame: FrameType | None) -> None:
    if signal.getsignal(number) is not _exit_for_signal:
        return  # The script's handler also calls this handler, and decides when to exit.
    if agreed_stop.request(signal.Signals(number)):
        threading.Thread(target=_repeat_after_timeout, args=(signal.Signals(number),), daemon=True).start()
        return
    _exit(signal.Signals(number))


def _exit(number: signal.Signals, step: int | None = None) -> NoReturn:
    global _exit_signal
    if _exit_signal is None:
        _exit_signal = number
        # First, because the file system of the run folder may hang.
        threading.Thread(target=_force_exit_after_timeout, name="hpctrain-leaving", daemon=True).start()
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            # print is not used, because the signal may have interrupted it.
            with contextlib.suppress(OSError):
                os.write(2, f"hpctrain: {exit_message(number, os.environ, step)}\n".encode())
    # C++ code that initializes torch does not pass an exception on, but aborts the process.
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        os._exit(EXIT_CONTINUE)
    raise StoppedBeforeTraining(EXIT_CONTINUE)


def _release_after_stop() -> None:
    if _exit_signal is not None:
        release_devices()


def exit_after_step() -> None:
    """Exit and request a continuation if all ranks stop after the step that this rank has completed."""
    if agreed_stop.after_step():
        _exit(agreed_stop.signal or signal.SIGTERM, activity.step)


def raise_stop_signal(number: signal.Signals) -> None:
    """Send a stop signal that the script handles to the main thread, unless Slurm has sent one already."""
    not_handled = (signal.SIG_DFL, signal.SIG_IGN, _exit_for_signal)
    handled = [stop for stop in STOP_SIGNALS if signal.getsignal(stop) not in not_handled]
    if pending_stop_signal() is None:
        number = number if number in handled or not handled else handled[0]
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def release_limit_s() -> float:
    """Return the maximum seconds for `release_devices_within` after a stop."""
    return agreement_timeout_s(signal.SIGTERM, os.environ)


def leave_in_time(number: signal.Signals, passed_s: float) -> None:
    """Exit shortly before this rank would be killed, unless it saves; another thread calls this again."""
    handler = signal.getsignal(number)
    flag = getattr(handler, "__self__", None)
    may_leave = flag.may_leave if isinstance(flag, StopFlag) else handler is _exit_for_signal
    if not may_leave or activity.phase == RankPhase.SAVE:
        return
    grace_s = _grace_s(number)
    margin_s = min(LEAVE_MARGIN_S, grace_s * _LEAVE_SHARE)
    if passed_s < grace_s - margin_s:
        return
    report_stacks(
        f"still in phase {activity.phase} {passed_s:.0f} s after {number.name}, this rank exits, because it "
        f"would be killed after {grace_s:.0f} s"
    )
    release_devices_within(margin_s / 2)
    os._exit(EXIT_CONTINUE)


def _grace_s(number: signal.Signals) -> float:
    """Return the seconds between a signal and the end of this process by Slurm; infinite if unknown."""
    with contextlib.suppress(UserError):
        grace = read_stop_grace(os.environ)
        run, attempt = attempt_of(os.environ)
        return grace.get(run.grace_key(attempt) or number.name, math.inf)
    return math.inf


def _repeat_after_timeout(number: signal.Signals) -> None:
    """Repeat a signal if the ranks have not stopped after a common step; the rank then exits immediately."""
    time.sleep(agreement_timeout_s(number, os.environ))
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _repeat_late_signal(number: signal.Signals) -> None:
    global _late_signal
    time.sleep(LATE_SIGNAL_TIMEOUT_S)
    if _late_signal is not None:
        _late_signal = None
        signal.pthread_kill(threading.main_thread().ident or 0, number)


def _force_exit_after_timeout() -> None:
    """End this process if the exception was swallowed by a finalizer, or its clean-up waits for peers."""
    time.sleep(EXIT_TIMEOUT_S)
    if not is_exiting():
        return  # Signals are captured now, and that code received this signal.
    report_stacks(f"this rank is still running {EXIT_TIMEOUT_S:.0f} s after a stop signal, so it exits now")
    os._exit(EXIT_CONTINUE)


@functools.cache
def _install_fork_hooks() -> None:
    """Configure forked children to exit on SIGTERM and to ignore the time limit signal.

    With the rank's handler, a child would ignore the SIGTERM of its process pool, and the pool would wait
    forever. A signal during a fork is blocked until the child is ready, because the interpreter would forget
    it. Workers of a DataLoader keep it blocked, unless the caller has blocked it for its own reasons.
    """
    held_back = threading.local()

    def before() -> None:
        held_back.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        held_back.is_worker = not held_back.mask.issuperset(STOP_SIGNALS) and _is_forked_by_loader()

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held_back.mask)

    def in_child() -> None:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler is _exit_for_signal or getattr(handler, "__func__", None) is StopFlag.record:
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
        if held_back.is_worker:
            threading.Thread(target=_exit_on_signal_of, args=(os.getppid(),), daemon=True).start()
        else:
            after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _is_forked_by_loader() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("multiprocessing."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_LOADER_MODULES)


def _exit_on_signal_of(rank: int) -> None:
    """Exit on a blocked stop signal that the rank sends, as multiprocessing does at its exit."""
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != rank:
        pass
    os._exit(0)


def exit_message(number: signal.Signals, environ: Mapping[str, str], step: int | None = None) -> str:
    """Describe the signal and the lost work; `step` is the last step of all ranks, if they agreed."""
    exiting = "exiting" if step is None else f"all ranks exit after step {step} of this attempt"
    run = RunDir(Path(environ[RUN_DIR_VARIABLE])) if RUN_DIR_VARIABLE in environ else None
    try:
        cause = _cause(number, run, int(environ.get(ATTEMPT_VARIABLE, "0")))
        return f"received {number.name} ({cause}); {exiting}. {_lost(run)}"
    except OSError as error:
        return f"received {number.name}; {exiting}. The run folder cannot be read: {error}"


def _cause(number: signal.Signals, run: RunDir | None, attempt: int) -> str:
    if number == signal.SIGUSR2:
        return "the time limit is near"
    if run is not None and run.cancel_request.exists():
        return "cancellation"
    if run is not None and run.is_asked_to_requeue(attempt):
        return "requeue"
    return "preemption, requeue or cancellation"


def _lost(run: RunDir | None) -> str:
    if has_started():
        return (
            "No training is in progress. The checkpoints of completed training runs are intact. Work outside "
            "training is not saved."
        )
    if "hpctrain.training" in sys.modules:
        return "Training has not started; checkpoints of earlier attempts are intact."
    if run is not None and run.function.exists():
        return "Work that the function neither saves itself nor returns from its method `checkpoint` is lost."
    unused = "This script does not use hpctrain's Trainer, so hpctrain has not saved the state."
    if run is None:
        return unused
    pattern = os.environ.get(CHECKPOINTS_VARIABLE)
    if (checkpoint := newest_script_checkpoint(run.checkpoints, pattern)) is None:
        return (
            f"{unused} {pattern or run.checkpoints} contains no checkpoint written by the script, so work "
            "that the script has not saved elsewhere is lost."
        )
    path, saved_at = checkpoint
    age = format_duration(max(0.0, time.time() - saved_at))
    return f"{unused} The script's last checkpoint is {path} ({age} old). Work since then is lost."


def should_stop() -> bool:
    """Collective. Return true if the job received a stop signal, with the same result on all ranks.

    Call this at points where the state can be saved, at least every few seconds. If the result is true, save
    and exit with `sys.exit(75)`, which requests a continuation. After the first call, a signal no longer ends
    the rank. Each call performs a small all-reduce on the CPU.

    Raises:
        RendezvousError: the ranks did not form a process group.
    """
    is_stopping = _consensus().any_rank_signalled()
    # Each call counts as a step, instead of those of optimizers.
    activity.is_managed = True
    activity.set_phase(RankPhase.SCRIPT)
    activity.step_done()
    return is_stopping


class _StopConsensus:
    def __init__(self) -> None:
        """Collective. Start to record signals, and join the other ranks."""
        # Never exited, because the script is expected to call this again.
        self._listening = capture_stop_signals()
        self._flag = self._listening.__enter__()
        ranks = detect(os.environ)
        self._announces, self._context = ranks.is_main, None
        if ranks.world_size > 1:  # a single rank needs no torch
            from hpctrain.runtime.distributed_context import init_distributed

            self._context = init_distributed(ranks, os.environ)

    def any_rank_signalled(self) -> bool:
        stop = self._flag.is_set
        if self._context is not None:
            stop = self._context.all_reduce_min(-float(stop)) < 0
        self._flag.may_leave = not stop
        if stop and self._announces:
            self._announces = False
            print(f"hpctrain: stop requested by {self._flag.signal_name or 'a signal to another rank'}")
        return stop


@functools.cache
def _consensus() -> _StopConsensus:
    return _StopConsensus()
