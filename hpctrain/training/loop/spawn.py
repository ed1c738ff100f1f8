"""Launch the ranks from the process that called `fit`, such as a notebook."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from hpctrain.cluster.ports import bind_socket
from hpctrain.cluster.processes import block_signals, die_with_parent
from hpctrain.cluster.visible_gpus import VISIBLE_VARIABLE, visible_devices
from hpctrain.errors import EXIT_CONTINUE, HpctrainError, UserError
from hpctrain.files import write_atomic
from hpctrain.records.call_payload import dumps
from hpctrain.runtime.stopping.stop_signals import StopFlag, capture_stop_signals

#: Time for the other ranks to detect a failed rank, in seconds.
_NOTICE_S = 5.0
_POLL_INTERVAL_S = 0.05

#: Tensors, which are not pickled because that would require twice the memory, and other results.
SpawnResult = tuple[dict[str, torch.Tensor], dict[str, Any]]


def spawn_ranks(
    places: Sequence[int | None],
    train: Callable[..., SpawnResult],
    *,
    caller: str,
    environ: Mapping[str, str],
    **arguments: Any,
) -> SpawnResult:
    """Start a process with `train(**arguments)`, pickled with the script's definitions, for each place."""
    call = dumps((train, arguments), caller, list(arguments.items()))
    with (
        # Rank 0 listens on this port.
        bind_socket(local_only=True) as reserved,
        tempfile.TemporaryDirectory(prefix="hpctrain-spawn-") as folder,
        capture_stop_signals() as stop,
    ):
        port = reserved.getsockname()[1]
        Path(folder, "call").write_bytes(call)
        context = mp.get_context("spawn")
        processes = [
            context.Process(
                target=_run_rank,
                args=(folder, rank, _variables(rank, places, port, environ), sys.argv),
                name=f"hpctrain-rank-{rank}",
            )
            for rank in range(len(places))
        ]
        try:
            resource_tracker.ensure_running()  # started later, it would unblock signals
            # The ranks ignore Ctrl-C as soon as they can.
            with _hide_main_module(), block_signals(signal.SIGINT):
                for process in processes:
                    process.start()
            _wait_for_all(processes, stop)
            return _outcome(Path(folder), processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _variables(
    rank: int, places: Sequence[int | None], port: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank, with all ranks on this machine."""
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(places))),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"spawned-{os.getpid()}",
        "GLOO_SOCKET_IFNAME": environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if gpus := [place for place in places if place is not None]:
        names = visible_devices(environ)
        variables[VISIBLE_VARIABLE] = ",".join(str(gpu) if names is None else names[gpu] for gpu in gpus)
    return variables


def _run_rank(folder: str, rank: int, variables: Mapping[str, str], argv: list[str]) -> None:
    die_with_parent()
    # Ctrl-C in a terminal signals all processes. The caller handles Ctrl-C and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(variables)
    sys.argv = argv
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(variables["WORLD_SIZE"])))
    try:
        train, arguments = pickle.loads(Path(folder, "call").read_bytes())
        tensors, values = train(**arguments)
        if rank == 0:
            torch.save(tensors, Path(folder, "tensors"))
            pickled = dumps(values, "Trainer.fit", [("its return value", values)])
            Path(folder, "values").write_bytes(pickled)
    except Exception as error:  # noqa: BLE001 (the caller raises it)
        kind = UserError if isinstance(error, UserError) else HpctrainError
        text = str(error) if kind is UserError else traceback.format_exc()
        write_atomic(Path(folder, f"failure-{rank}"), pickle.dumps((kind, text)))
        raise SystemExit(1) from None


def _outcome(folder: Path, processes: Sequence[Any]) -> SpawnResult:
    codes = [process.exitcode for process in processes]
    if not any(codes):
        tensors = torch.load(folder / "tensors", weights_only=True)
        return tensors, pickle.loads((folder / "values").read_bytes())
    if all(code in (0, EXIT_CONTINUE) for code in codes):
        raise SystemExit(EXIT_CONTINUE)
    # The first failure is the cause; later failures only report the lost rank.
    failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime)
    if failures:
        rank = failures[0].name.partition("-")[2]
        kind, text = pickle.loads(failures[0].read_bytes())
        raise kind(f"Rank {rank} of {len(processes)} failed:\n{text}")
    lost, code = next((rank, code) for rank, code in enumerate(codes) if code not in (0, None))
    raise HpctrainError(
        f"Rank {lost} of {len(processes)} exited with code {code} without reporting an error. The rank was "
        "killed or called os._exit()."
    )


def _wait_for_all(processes: Sequence[Any], stop: StopFlag) -> None:
    is_forwarded = stop.may_leave = False
    while running := [process for process in processes if process.is_alive()]:
        if stop.signal_name and not is_forwarded:
            is_forwarded = True
            for process in running:
                os.kill(process.pid, getattr(signal, stop.signal_name))
        if any(process.exitcode not in (None, 0, EXIT_CONTINUE) for process in processes):
            deadline = time.monotonic() + _NOTICE_S
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return
        wait([process.sentinel for process in running], _POLL_INTERVAL_S)


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Prevent multiprocessing from importing the script, which would start the training again."""
    main = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)
