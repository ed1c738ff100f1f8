"""Replacements for the names of `hpctrain.system`, bound to the scheduler."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty
from typing import Any

from simulation.scheduler import EPOCH, ProcessKilled, Scheduler, SimProcess, SimThread


def _own_process() -> SimProcess:
    process = Scheduler.current.process
    assert process is not None
    return process


def monotonic() -> float:
    return Scheduler.current.now


def time() -> float:
    return EPOCH + Scheduler.current.now


def sleep(seconds: float) -> None:
    Scheduler.current.sleep(seconds)


def getpid() -> int:
    process = Scheduler.current.process
    return 1 if process is None else process.pid


def gethostname() -> str:
    return _own_process().host


def handle_signal(number: int, handler: Callable[[int, None], object]) -> None:
    _own_process().handlers[number] = handler


def exit_now(code: int) -> None:
    _own_process().end(code)
    raise ProcessKilled


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        Scheduler.current.check_alive()
        self._set = True
        for thread in self._waiting:
            Scheduler.current.wake(thread)
        self._waiting.clear()

    def wait(self, timeout: float | None = None) -> bool:
        scheduler = Scheduler.current
        scheduler.step()
        deadline = None if timeout is None else scheduler.now + timeout
        while not self._set:
            assert scheduler.running is not None
            self._waiting.append(scheduler.running)
            if not scheduler.park(deadline):
                break
        return self._set


class Lock:
    """A lock, which one thread may acquire repeatedly."""

    def __init__(self) -> None:
        self._owner: object = None
        self._count = 0
        self._waiting: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = Scheduler.current
        scheduler.check_alive()
        me = scheduler.running or self
        while self._owner not in (None, me):
            if not blocking:
                return False
            assert scheduler.running is not None
            self._waiting.append(scheduler.running)
            scheduler.park()
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._owner = None
            if self._waiting:
                Scheduler.current.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[SimThread] = deque()

    def put(self, item: Any) -> None:
        Scheduler.current.check_alive()
        self._items.append(item)
        if self._waiting:
            Scheduler.current.wake(self._waiting.popleft())

    def get(self, timeout: float | None = None) -> Any:
        scheduler = Scheduler.current
        scheduler.step()
        deadline = None if timeout is None else scheduler.now + timeout
        while not self._items:
            me = scheduler.running
            assert me is not None
            self._waiting.append(me)
            if not scheduler.park(deadline) and not self._items:
                if me in self._waiting:
                    self._waiting.remove(me)
                raise Empty
        return self._items.popleft()

    def __class_getitem__(cls, _: object) -> "type[SimpleQueue]":
        return cls


class ThreadPoolExecutor:
    """Runs the calls one after the other."""

    def __init__(self, max_workers: int) -> None:
        pass

    def __enter__(self) -> "ThreadPoolExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)


Thread = SimThread
RLock = Lock
