"""Virtual time, and threads of which only one runs at a time.

A thread that waits picks the next event itself. It runs callbacks inline, and hands over only to another
thread. Ties are broken by the seed.
"""

import heapq
import random
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

#: Start of the virtual time, in seconds since the epoch.
EPOCH = 1_790_000_000.0
_MAX_EVENTS = 60_000


class ProcessKilled(BaseException):
    """Raised in the threads of a killed process; no code of the process has an effect from then on."""


class Violation(AssertionError):
    """An invariant does not hold."""


class SimProcess:
    def __init__(self, scheduler: "Scheduler", host: str, name: str) -> None:
        self.scheduler, self.host, self.name = scheduler, host, name
        scheduler.processes.append(self)
        self.pid = 1000 + len(scheduler.processes)
        self.killed = False
        self.code: int | None = None
        self.threads: list[SimThread] = []
        self.handlers: dict[int, Callable[[int, None], object]] = {}
        self.on_exit: Callable[[int], object] = lambda _: None
        self.paused_until = 0.0

    def start(self, main: Callable[[], int]) -> None:
        """Start the main thread; its end is the end of the process."""

        def run() -> None:
            try:
                code = main()
            except SystemExit as error:
                code = int(error.code or 0)
            for thread in self.threads[1:]:
                if not thread.daemon and not thread.ended:
                    thread.join()
            self.end(code)

        thread = SimThread(target=run, name="main", process=self)
        thread.start()

    def signal(self, number: int) -> None:
        """Deliver a signal. The handler runs at once, as between two instructions of the main thread."""
        if self.killed:
            return
        handler = self.handlers.get(number)
        if number == signal.SIGKILL or handler is None:
            self.end(-number)
        else:
            with self.scheduler.acting(self):
                handler(number, None)

    def end(self, code: int) -> None:
        """End the process. Its threads unwind before anything else happens."""
        if self.killed:
            return
        self.killed, self.code = True, code
        scheduler = self.scheduler
        scheduler.trace("exit", self.name, code)
        for thread in self.threads:
            if thread.started and not thread.ended and thread is not scheduler.running:
                scheduler.push_first(thread)
        scheduler.call_soon(lambda: self.on_exit(code))


class SimThread:
    """A thread of a simulated process, with the interface of `threading.Thread`."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: None = None,
        *,
        daemon: bool | None = None,
        process: SimProcess | None = None,
    ) -> None:
        self.scheduler = Scheduler.current
        self.process = process or self.scheduler.process
        assert self.process is not None
        assert target is not None
        self.name, self.daemon = name or "thread", bool(daemon)
        self._target, self._args = target, args
        self.started = self.ended = False
        self.token = 0
        self.woken = False
        self._joining: list[SimThread] = []
        self.worker: _Worker | None = None

    def start(self) -> None:
        if self.process.killed:
            raise ProcessKilled
        self.process.threads.append(self)
        self.started = True
        self.scheduler.wake(self)

    def run(self) -> None:
        try:
            if not self.process.killed:
                self._target(*self._args)
        except ProcessKilled:
            pass
        except BaseException as error:  # noqa: BLE001 (reported to the main thread)
            self.scheduler.failure = self.scheduler.failure or error
        self.ended = True
        for other in self._joining:
            self.scheduler.wake(other)

    def join(self, timeout: float | None = None) -> None:
        self.scheduler.check_alive()
        if not self.ended and self.started:
            me = self.scheduler.running
            assert me is not None
            self._joining.append(me)
            deadline = None if timeout is None else self.scheduler.now + timeout
            while not self.ended and self.scheduler.park(deadline):
                pass

    def is_alive(self) -> bool:
        return self.started and not self.ended


class _Worker:
    """A thread of the operating system, which is reused for many simulated threads."""

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.thread: SimThread | None = None
        threading.Thread(target=self._loop, daemon=True).start()

    def _loop(self) -> None:
        while True:
            self.baton.acquire()
            assert self.thread is not None
            thread, scheduler = self.thread, self.thread.scheduler
            thread.run()
            self.thread = thread.worker = None
            Scheduler.idle_workers.append(self)
            scheduler.leave()


class Scheduler:
    """The events of a simulated world in virtual time."""

    current: "Scheduler"
    idle_workers: ClassVar[list[_Worker]] = []

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.running: SimThread | None = None
        self.process: SimProcess | None = None
        """The process whose code is running."""
        self.failure: BaseException | None = None
        self.world: Any = None
        self.root = "/"
        """Folder of the run, which differs between processes."""
        self.processes: list[SimProcess] = []
        self.num_events = self.num_steps = 0
        self.trace_hash = 0
        self.kill_at_steps: set[int] = set()
        """Steps at which the running process is killed."""
        self.yield_probability = 0.1
        self.log: list[str] | None = None
        """The trace as text, if it is recorded."""
        self._heap: list[tuple[float, float, int, Any, int, bool]] = []
        self._count = 0
        self._main = threading.Lock()
        self._main.acquire()
        Scheduler.current = self

    def trace(self, *words: object) -> None:
        text = f"{self.now:.3f} {' '.join(map(str, words))}".replace(self.root, "")
        self.trace_hash = zlib.crc32(text.encode(), self.trace_hash)
        if self.log is not None:
            self.log.append(text)

    @contextmanager
    def acting(self, process: SimProcess) -> Iterator[None]:
        """Run code of a process inside a callback."""
        before, self.process = self.process, process
        try:
            yield
        finally:
            self.process = before

    def call_at(self, moment: float, callback: Callable[[], object]) -> None:
        self._push(max(moment, self.now), self.random.random(), callback, 0, woken=False)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> None:
        self.call_at(self.now + seconds, callback)

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.call_at(self.now, callback)

    def push_first(self, thread: SimThread) -> None:
        """Run a thread before all other events."""
        self._push(self.now, -1.0, thread, thread.token, woken=False)

    def wake(self, thread: SimThread) -> None:
        """Let a waiting thread continue."""
        self._push(self.now, self.random.random(), thread, thread.token, woken=True)

    def park(self, deadline: float | None = None) -> bool:
        """Let the running thread wait until it is woken, or until `deadline`. True if it was woken."""
        me = self.running
        assert me is not None, "code outside of a thread must not wait"
        if deadline is not None:
            self._push(max(deadline, self.now), self.random.random(), me, me.token, woken=False)
        following = self._next(me)
        if following is not me:
            self._hand_over(following)
            assert me.worker is not None
            me.worker.baton.acquire()
        self.running, self.process = me, me.process
        if me.process.killed:
            raise ProcessKilled
        return me.woken

    def sleep(self, seconds: float) -> None:
        self.check_alive()
        deadline = self.now + seconds
        while self.now < deadline:
            self.park(deadline)

    def check_alive(self) -> None:
        """Raise `ProcessKilled` in code of a killed process."""
        if self.process is not None and self.process.killed:
            raise ProcessKilled

    def step(self) -> None:
        """Mark a point at which the running process may be killed, and other threads may run."""
        process = self.process
        if process is None:
            return
        if process.killed:
            raise ProcessKilled
        self.num_steps += 1
        if self.num_steps in self.kill_at_steps:
            self.trace("kill", process.name, self.num_steps)
            process.end(-signal.SIGKILL)
            raise ProcessKilled
        if self.running is not None and self.random.random() < self.yield_probability:
            self.park(self.now)

    def leave(self) -> None:
        """Continue with the next event after the end of the running thread."""
        self._hand_over(self._next(None))

    def run(self) -> None:
        following = self._next(None)
        if following is not None:
            self._hand_over(following)
            self._main.acquire()
        self.running = self.process = None
        if self.failure is not None:
            raise self.failure

    def _push(self, moment: float, order: float, what: Any, token: int, *, woken: bool) -> None:
        self._count += 1
        heapq.heappush(self._heap, (moment, order, self._count, what, token, woken))

    def _hand_over(self, following: SimThread | None) -> None:
        if following is None:
            self._main.release()
            return
        if following.worker is None:
            following.worker = Scheduler.idle_workers.pop() if Scheduler.idle_workers else _Worker()
            following.worker.thread = following
        self.running, self.process = following, following.process
        following.worker.baton.release()

    def _next(self, me: SimThread | None) -> SimThread | None:
        """Run callbacks until a thread is next. None ends the simulation."""
        self.running = self.process = None
        while self._heap and self.failure is None:
            moment, _, _, what, token, woken = heapq.heappop(self._heap)
            if isinstance(what, SimThread):
                if what.ended or token != what.token:
                    continue
                process = what.process
                if process.paused_until > moment and not process.killed:
                    self._push(process.paused_until, self.random.random(), what, token, woken=woken)
                    continue
                self.now = moment
                what.token += 1
                what.woken = woken
                self._count_event()
                return what
            self.now = moment
            self._count_event()
            try:
                what()
            except BaseException as error:  # noqa: BLE001 (reported to the main thread)
                self.failure = error
        return self._unwind()

    def _unwind(self) -> SimThread | None:
        """Return a thread that must still unwind at the end of the simulation."""
        self._heap.clear()
        for process in self.processes:
            process.killed = True
        for process in self.processes:
            for thread in process.threads:
                if thread.started and not thread.ended:
                    thread.token += 1
                    return thread
        return None

    def _count_event(self) -> None:
        self.num_events += 1
        if self.num_events > _MAX_EVENTS and self.failure is None:
            self.failure = Violation(f"no end after {_MAX_EVENTS} events")
