"""Run a script on one or several ranks, forked from a server that has torch imported.

To test the start itself, or the process of a rank, start a real command instead.
"""

import multiprocessing
import os
import runpy
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from helpers.commands import environment
from helpers.waiting import deadline_in
from hpctrain.errors import EXIT_CONTINUE

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.checkpoint", "hpctrain.training.trainer", "pytest"]
)

#: Set for each test: only tests with the marker `ranks` may start processes.
may_start = False


def run_forked(
    script: Path,
    args: Sequence[str],
    env: Mapping[str, str],
    *,
    ranks: int = 1,
    nodes: int = 1,
    timeout: float = 60.0,
) -> str:
    """Run a Python script like torchrun, on `ranks` ranks in total, and return the output of rank 0.

    The test fails, with the output of each rank, if one fails or they take longer than `timeout` seconds.
    """
    port, processes = free_port(), []
    with TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(ranks)]
        try:
            for rank, output in enumerate(outputs):
                of_rank = torchrun_variables(rank, ranks, nodes, port) if ranks > 1 else {}
                processes.append(
                    start_process(run_script, (script, list(args), environment(env) | of_rank, output))
                )
            problem = _wait_for_all(processes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [output.read_text() if output.exists() else "" for output in outputs]
    if problem:
        outputs_by_rank = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(texts))
        raise AssertionError(f"{problem} of {ranks}: {script} {list(args)}\n{outputs_by_rank}")
    return texts[0]


def start_process(target: Callable[..., None], arguments: Sequence[object]) -> BaseProcess:
    """Fork a process that calls `target`. The caller ends and joins it."""
    assert may_start, "mark this test `ranks`: it starts processes, and `make test-fast` leaves those out"
    process = CONTEXT.Process(target=target, args=tuple(arguments))
    process.start()
    return process


def _wait_for_all(processes: list, timeout: float) -> str | None:
    """Wait until all have exited with 0; return the first problem otherwise.

    If a rank stops, the others do so, too, so they are not killed.
    """
    deadline, stop = deadline_in(timeout), None
    running = {process.sentinel: (rank, process) for rank, process in enumerate(processes)}
    while running:
        ready = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"no end after {timeout} s of ranks {[rank for rank, _ in running.values()]}"
        for sentinel in ready:
            rank, process = running.pop(sentinel)
            process.join()
            if process.exitcode == EXIT_CONTINUE:
                stop = stop or f"exit code {process.exitcode} of rank {rank}"
            elif process.exitcode:
                return f"exit code {process.exitcode} of rank {rank}"
    return stop


def free_port() -> int:
    """Return a port that no outgoing connection of another test takes before it is used."""
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def torchrun_variables(rank: int, ranks: int, nodes: int, port: int) -> dict[str, str]:
    ranks_per_node = ranks // nodes
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_per_node),
        "GROUP_RANK": str(rank // ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "TORCHELASTIC_RUN_ID": "forked",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _unpickle(unpickle: Callable[..., object], *arguments: object) -> object:
    """Allow only the test's own scripts to unpickle."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(("torch.", "contextlib")):
        frame = frame.f_back
    name = frame.f_globals["__name__"]
    assert not name.startswith(("hpctrain", "torch")), f"{name} unpickles from a peer"
    return unpickle(*arguments)


def enter_rank(variables: Mapping[str, str], output: Path) -> None:
    """Set variables and output of this forked process; hpctrain must not unpickle from a peer in it."""
    import torch
    from torch.distributed import distributed_c10d

    distributed_c10d._tensor_to_object = partial(_unpickle, distributed_c10d._tensor_to_object)
    with open(output, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(variables)
    # The library has read its variable already.
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", "1")))


def run_script(script: Path, args: list[str], variables: dict[str, str], output: Path) -> None:
    enter_rank(variables, output)
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
