"""Call a test's function on several ranks with a process group."""

import faulthandler
import functools
import importlib
import inspect
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from helpers.commands import environment
from helpers.fork_server import CONTEXT, enter_rank, free_port, start_process, torchrun_variables
from helpers.waiting import deadline_in

_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_on_ranks(
    function: Callable[..., Any],
    *arguments: object,
    world_size: int = 2,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    group: bool = True,
    killed: Sequence[int] = (),
    returns_output: bool = False,
) -> list[Any]:
    """Call a function on each rank, forked from a server with torch imported; return results or output.

    The test fails if a rank raises, ends early or is late. The message has the rank, its traceback and the
    output of all ranks.

    The function is at the top level of a module, which each rank imports. With `group`, there is a gloo
    process group, and no rank ends before all have returned. The result of ranks in `killed` is None.
    """
    __tracebackhide__ = True
    from torch.distributed import TCPStore

    if "<locals>" in function.__qualname__:
        raise ValueError(
            f"ranks cannot import {function.__qualname__}: move it to the top level of its module"
        )
    call = (function.__module__, function.__qualname__, pickle.dumps(arguments))
    # The store outlives every rank, and no other process can take its port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group else None
    port = free_port()
    with TemporaryDirectory() as folder:
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                variables = _VARIABLES | torchrun_variables(number, world_size, 1, port) | dict(env or {})
                ranks.append(_Rank(call, environment(variables), Path(folder, str(number)), store, timeout))
            problem = _wait_for_results(ranks, timeout, killed)
        finally:
            for rank in ranks:
                rank.kill()
        outputs = [rank.read_output() for rank in ranks]
    if problem:
        texts = (f"rank {number}:\n{output}" for number, output in enumerate(outputs))
        raise AssertionError("\n".join([f"{function.__name__}: {problem}", *texts]))
    return outputs if returns_output else [rank.value for rank in ranks]


def on_ranks(**options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on each rank, with the same fixtures and parameters."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: object) -> None:
            run_on_ranks(body, *arguments.values(), **options)

        return test

    return decorate


class _Rank:
    def __init__(
        self,
        call: tuple[str, str, bytes],
        variables: dict[str, str],
        output: Path,
        store: Any,
        limit_s: float,
    ) -> None:
        self._output, self.value, self.returned = output, None, False
        self.connection, child_connection = CONTEXT.Pipe()
        port = None if store is None else store.port
        self.process = start_process(_run, (call, variables, output, port, child_connection, limit_s))
        child_connection.close()

    def receive(self) -> str | None:
        """Receive the value; return a problem if there is none."""
        try:
            succeeded, self.value = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join()
            return f"ended with exit code {self.process.exitcode} before it returned"
        self.returned = True
        return None if succeeded else "failed"

    def read_output(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def kill(self) -> None:
        """Kill the process and its children, if it still runs."""
        self.connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _wait_for_results(ranks: list[_Rank], timeout: float, killed: Sequence[int]) -> str | None:
    """Wait until all ranks have returned and ended; return the first problem otherwise."""
    deadline = deadline_in(timeout)
    waiting = dict(enumerate(ranks))
    while waiting:
        connections = {rank.connection: number for number, rank in waiting.items()}
        sentinels = {rank.process.sentinel: number for number, rank in waiting.items()}
        ready = wait([*connections, *sentinels], max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"no end after {timeout} s of ranks {list(waiting)}"
        for number in {(connections | sentinels)[handle] for handle in ready}:
            problem = waiting.pop(number).receive()
            died = ranks[number].process.exitcode == -signal.SIGKILL
            if problem and not (number in killed and died):
                return f"rank {number} of {len(ranks)} {problem}"
    for rank in ranks:
        if rank.returned:
            with suppress(BrokenPipeError):  # it has ended
                rank.connection.send_bytes(b"end")
    for number, rank in enumerate(ranks):
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.exitcode is None:
            return f"rank {number} of {len(ranks)} returned, and did not end within {timeout} s"
        if rank.process.exitcode and number not in killed:
            return f"rank {number} of {len(ranks)} returned, and ended with exit code {rank.process.exitcode}"
    return None


def _run(
    call: tuple[str, str, bytes],
    variables: dict[str, str],
    output: Path,
    port: int | None,
    connection: Connection,
    limit_s: float,
) -> None:
    os.setpgid(0, 0)
    enter_rank(variables, output)
    faulthandler.dump_traceback_later(max(1.0, limit_s - 1.0))
    module, name, arguments = call
    try:
        _rewrite_assertions()
        function = inspect.unwrap(getattr(importlib.import_module(module), name))
        if port is not None:
            import torch.distributed as dist

            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        answer = pickle.dumps((True, function(*pickle.loads(arguments))))
    except BaseException as error:  # noqa: BLE001 (the test gets its traceback)
        # The frame of this function is of no use to the reader.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        answer = pickle.dumps((False, None))
    connection.send_bytes(answer)
    if port is not None:
        with suppress(EOFError):
            connection.recv_bytes()
    faulthandler.cancel_dump_traceback_later()


def _rewrite_assertions() -> None:
    """Make failed assertions of test modules show values in this process, too."""
    from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key

    settings = {"python_files": ["test_*.py"], "enable_assertion_pass_hook": False}
    state = SimpleNamespace(trace=lambda _: None)
    hook = AssertionRewritingHook(
        SimpleNamespace(getini=settings.__getitem__, stash={assertstate_key: state})
    )
    sys.meta_path.insert(0, hook)
