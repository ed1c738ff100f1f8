"""Load batches in the rank itself, or in advance in data workers.

Data workers are those of a DataLoader of torch, with control over signals and their exit: Slurm signals every
process of a step, but a rank that has to stop still needs its last batches. A data worker therefore ignores
the signals of the job from its first instruction. It exits when the rank dies for any reason. An exiting rank
does not wait for a stuck data worker.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpctrain.cluster.processes import block_signals, die_with_parent
from hpctrain.errors import DataWorkerKilled, HpctrainError
from hpctrain.runtime.failure_file import wait_for_dead_worker
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.text import signal_name
from hpctrain.training.base.rng import derive_seed
from hpctrain.training.data.fetcher import BatchOrder, Fetcher
from hpctrain.training.data.loader_config import LoaderConfig, pin_batch
from hpctrain.training.data.sample_seeds import PROGRESS_FIELDS, describe_round, write_progress_to

_IGNORED_SIGNALS = (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP)
#: Interval, in seconds, of the check that a data worker is alive while the rank waits for it.
_POLL_INTERVAL_S = 2.0
#: Time limit, in seconds, for the exit of a data worker that is no longer needed.
_EXIT_TIMEOUT_S = 1.0


def load_batches(
    loading: LoaderConfig, fetcher: Fetcher, orders: Iterable[BatchOrder], name: str
) -> Generator[Any, None, None]:
    if not loading.num_workers:
        batches = fetcher.batches(orders)
        yield from map(pin_batch, batches) if loading.pin_memory else batches
        return
    # A list is sent within a message; a tensor would need a file descriptor.
    lists = ((epoch, indices.tolist()) for epoch, indices in orders)
    workers = LoaderWorkers(_BatchDataset(fetcher), lists, loading, name, loading.num_workers)
    with closing(workers):
        yield from workers


class LoaderWorkers:
    """Iterator over the results of a DataLoader's workers, to be closed."""

    def __init__(self, dataset: Any, orders: Any, loading: LoaderConfig, name: str, num_workers: int) -> None:
        self._timeout_s, self._name = loading.timeout_s, name
        self._closed = False
        self._progress_boards = [RawArray("q", [-1] * PROGRESS_FIELDS) for _ in range(num_workers)]
        loader: DataLoader[Any] = DataLoader(
            dataset,
            sampler=orders,
            batch_size=None,
            collate_fn=_identity,
            num_workers=num_workers,
            prefetch_factor=loading.prefetch_factor,
            pin_memory=loading.pin_memory,
            timeout=_POLL_INTERVAL_S,
            worker_init_fn=partial(
                _initialize_worker, os.getpid(), self._progress_boards, loading.worker_init_fn
            ),
            # The iterator draws a seed; a separate generator leaves the rank's generator unchanged. Without
            # seeds for each sample, workers of different ranks and epochs need different random numbers.
            generator=torch.Generator().manual_seed(derive_seed(torch.get_rng_state().tolist())),
        )
        before = set(multiprocessing.active_children())
        with block_signals(*_IGNORED_SIGNALS):
            self._results: Iterator[Any] | None = iter(loader)
            # Keep torch's SIGCHLD handler, which raises in the main thread, from reporting these workers.
            torch._C._remove_worker_pids(id(self._results))
            vars(self._results)["_worker_pids_set"] = False
        # At exit, multiprocessing sends SIGTERM and waits, but data workers ignore SIGTERM.
        atexit.register(self._end_at_exit)
        self._processes: list[BaseProcess] = sorted(
            set(multiprocessing.active_children()) - before,
            key=lambda process: (len(process.name), process.name),
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._results is None:
            raise StopIteration
        begun, polls = time.monotonic(), 0
        while True:
            try:
                return next(self._results)
            except (RuntimeError, OSError, EOFError) as error:
                if (dead := wait_for_dead_worker(error, self._processes)) is not None:
                    raise self._death(dead) from None
                if not str(error).startswith("DataLoader timed out"):
                    raise
            polls += 1
            # Another clock would count the time for which this process was suspended.
            waited_s = min(time.monotonic() - begun, 2 * polls * _POLL_INTERVAL_S)
            if waited_s >= self._timeout_s:
                places = "; ".join(self._position(i) for i in range(len(self._processes)))
                raise HpctrainError(
                    f"No batch of {self._name} arrived within {self._timeout_s:g} s "
                    f"(dataloader_timeout_s). Positions of the data workers: {places}. Check the data set "
                    "for a blocking call, or increase dataloader_timeout_s."
                )

    def close(self) -> None:
        if self._results is None or self._closed:
            return
        killer = threading.Timer(_EXIT_TIMEOUT_S, self._kill)
        killer.daemon = True
        killer.start()
        self._results = None  # the finalizer is torch's shutdown
        killer.cancel()
        self._kill()
        for process in self._processes:
            process.join()
        atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        # No thread or timer can be started at this point.
        self._kill()
        self._closed = True

    def _kill(self) -> None:
        for process in self._processes:
            with suppress(ValueError):  # already closed
                process.kill()

    def _death(self, process: BaseProcess) -> HpctrainError:
        number, code = self._processes.index(process), process.exitcode or 0
        worker, place = f"Data worker {number} (pid {process.pid})", self._position(number)
        if code < 0:
            return DataWorkerKilled(worker, signal_name(-code), place)
        return HpctrainError(f"{worker} exited with code {code} {place}.")

    def _position(self, number: int) -> str:
        epoch, index, second = self._progress_boards[number]
        if index < 0:
            return f"before the first sample of {self._name}"
        if second >= 0:
            return f"at sample {second} of shard {index} of {self._name}, {describe_round(epoch)}"
        return f"at sample {index} of {self._name}, {describe_round(epoch)}"


def _initialize_worker(
    rank_pid: int, boards: list[Any], worker_init_fn: Callable[[int], Any] | None, number: int
) -> None:
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid != rank_pid or not parent.is_alive():
        os._exit(1)
    for ignored in _IGNORED_SIGNALS:
        # Programs that the data worker starts would inherit SIG_IGN.
        signal.signal(ignored, lambda *_: None)
        signal.siginterrupt(ignored, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED_SIGNALS)
    # Print the Python traceback on a crash in C code.
    faulthandler.enable()
    write_progress_to(boards[number])
    if worker_init_fn is not None:
        worker_init_fn(number)


def _identity(result: Any) -> Any:
    return result


class _BatchDataset:
    """Data set for torch's DataLoader whose indices are orders and whose elements are batches."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, order: tuple[int, list[int]]) -> Any:
        epoch, indices = order
        return self._fetcher.fetch(epoch, torch.tensor(indices, dtype=torch.int64))
