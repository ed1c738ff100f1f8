"""Processes that load data for a rank: torch's DataLoader, made to last and to end with the rank.

Slurm signals every process of a step, and a rank that was told to stop still needs its last batches: so a
worker is deaf to the job's signals from its first instruction on. It is not deaf to the end of its rank,
whatever that died of, and a rank that leaves does not wait for a worker that is stuck.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.errors import HpctrainError
from hpctrain.runtime.lifeline import die_with_parent
from hpctrain.runtime.stop_notes import STOP_SIGNALS
from hpctrain.training.data.randomness import WHEREABOUTS, write_whereabouts_to

_DEAF_TO = (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP)
#: How often it is looked whether a worker that keeps the rank waiting is still alive, in seconds.
_LOOK_EVERY_S = 2.0
#: How long a worker may take to finish what it is at when it is no longer needed, in seconds.
_LEAVE_WITHIN_S = 1.0


class Workers:
    """Iterates over what the workers of a DataLoader fetch. Close it, or use it as a context manager."""

    def __init__(
        self,
        dataset: Any,
        orders: Any,
        *,
        num_workers: int,
        prefetch_factor: int,
        pin_memory: bool,
        timeout_s: float,
        name: str,
    ) -> None:
        """Start the workers.

        Args:
            dataset: each worker gets a copy.
            orders: what to ask the data set for, one after the other; None for an IterableDataset.
            num_workers: number of processes, at least 1.
            prefetch_factor: answers that each worker may have ready.
            pin_memory: whether to put answers into pinned memory.
            timeout_s: how long to wait for an answer.
            name: of the data set, for messages.
        """
        self._timeout_s, self._name = timeout_s, name
        self._is_over = False
        self._boards = [RawArray("q", [-1] * WHEREABOUTS) for _ in range(num_workers)]
        loader: DataLoader[Any] = DataLoader(
            dataset,
            sampler=orders,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=_LOOK_EVERY_S,
            worker_init_fn=partial(_begin_work, os.getpid(), self._boards),
            # The iterator draws a seed; from a generator of its own, it leaves the rank's as it was.
            generator=torch.Generator(),
        )
        before = set(multiprocessing.active_children())
        with _births_shielded():
            self._answers: Iterator[Any] | None = iter(loader)
        # At its exit, multiprocessing asks its processes by SIGTERM to leave, and waits for them.
        atexit.register(self._end_at_exit)
        self._processes: list[BaseProcess] = sorted(
            set(multiprocessing.active_children()) - before,
            key=lambda process: (len(process.name), process.name),
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next answer.

        Raises:
            HpctrainError: a worker died, or has not answered in time.
        """
        if self._answers is None:
            raise StopIteration
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return next(self._answers)
            except RuntimeError as error:
                dead = [i for i, process in enumerate(self._processes) if process.exitcode not in (None, 0)]
                if dead:
                    raise HpctrainError(self._obituary(dead[0])) from None
                if not str(error).startswith("DataLoader timed out"):
                    raise
            if time.monotonic() >= deadline:
                places = "; ".join(self._whereabouts(i) for i in range(len(self._processes)))
                raise HpctrainError(
                    f"no batch of {self._name} came within {self._timeout_s:g} s (data_timeout_s) from "
                    f"{len(self._processes)} data workers. They are at: {places}. "
                    "Look at what its __getitem__ waits for, or give it more time."
                )

    def close(self) -> None:
        """End the workers, and whichever does not end by itself within a second."""
        if self._answers is None or self._is_over:
            return
        killer = threading.Timer(_LEAVE_WITHIN_S, self._kill)
        killer.daemon = True
        killer.start()
        self._answers = None  # its end is torch's shutdown
        killer.cancel()
        self._kill()
        for process in self._processes:
            process.join()
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        # Threads, such as that of a timer, cannot be started any more.
        self._kill()
        self._is_over = True

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(ValueError):  # closed already
                process.kill()

    def _obituary(self, number: int) -> str:
        code = self._processes[number].exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " The kernel kills so when memory runs out." if code == -signal.SIGKILL else ""
        return (
            f"data worker {number} (pid {self._processes[number].pid}) {how} "
            f"at {self._whereabouts(number)}.{hint}"
        )

    def _whereabouts(self, number: int) -> str:
        epoch, index, second = self._boards[number]
        if index < 0:
            return f"{self._name}, no sample yet"
        if second >= 0:
            return f"sample {second} of shard {index} of {self._name}, epoch {epoch}"
        return f"sample {index} of {self._name}, epoch {epoch}"


@contextmanager
def _births_shielded() -> Iterator[None]:
    """Processes that are started meanwhile are born with the job's signals blocked.

    A signal that comes to this process itself is delivered when the block ends. Torch's handler for the death
    of a worker, which raises wherever the main thread is, is not left in place: `Workers` looks itself.
    """
    in_main = threading.current_thread() is threading.main_thread()
    on_death = signal.getsignal(signal.SIGCHLD)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if in_main:
            signal.signal(signal.SIGCHLD, on_death if on_death is not None else signal.SIG_DFL)


def _begin_work(rank_pid: int, boards: list[Any], number: int) -> None:
    """First thing in a worker: die with the rank, be deaf to the job, keep a note of what one is at."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != rank_pid or not parent.is_alive():
        os._exit(1)
    for deaf_to in _DEAF_TO:
        signal.signal(deaf_to, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    # A crash in C code names the line of Python that called it.
    faulthandler.enable()
    write_whereabouts_to(boards[number])


def _as_it_is(answer: Any) -> Any:
    return answer
