"""Call a function on each rank of a run: join the other ranks, call the function, write the result.

The worker runs this file by its path, like any script. Every attempt reads the call from the run folder. If
the function has a method `checkpoint`, it returns the call for the next attempt (submitit's protocol). All
ranks call this method after the function has exited, never inside a signal handler.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.cluster import detect
from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.files import make_folder, write_atomic
from hpctrain.records.call_payload import CallPayload, FunctionCall, dumps
from hpctrain.rundir import RunDir, attempt_of
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.runtime.failure_file import mark_non_retryable
from hpctrain.runtime.release_devices import shut_down_process_group
from hpctrain.runtime.snapshot_imports import redirect_imports
from hpctrain.runtime.stopping.signal_recorder import clear_stop_signals
from hpctrain.runtime.stopping.stop_signals import StoppedBeforeTraining, capture_stop_signals


def main() -> None:
    run, attempt = attempt_of(os.environ)
    ranks = detect(os.environ)
    payload = CallPayload.read(run.resume_call if run.resume_call.exists() else run.function)
    this_folder = str(Path(__file__).parent)
    sys.path[:] = dict.fromkeys([*payload.sys_path, *(path for path in sys.path if path != this_folder)])
    redirect_imports(os.environ)
    # Variables of submitit.JobEnvironment, beyond those that the launcher sets.
    os.environ.setdefault("SUBMITIT_EXECUTOR", "slurm")
    os.environ.setdefault("SUBMITIT_FOLDER", str(run.path))
    os.environ.setdefault("SLURM_NTASKS", str(ranks.world_size))
    context = init_distributed(ranks, os.environ)
    if not context.is_distributed:  # collectives work on any number of ranks
        backend = "cpu:gloo,cuda:nccl" if context.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(shut_down_process_group)
    try:
        call = payload.deserialize()
        value = _result_of(call, payload, run, context)
        data = dumps(value, call.name, [("result", value)])
    except Exception as error:
        if _is_final(error, payload, run):
            mark_non_retryable(error)
        with suppress(Exception):
            _write(run.exception_pickle(attempt, ranks.rank), dumps(error, "", []))
        raise
    _write(run.result(attempt, ranks.rank), data)
    # The function has returned, so later stop signals are irrelevant.
    clear_stop_signals()


def _write(path: Path, pickle: bytes) -> None:
    make_folder(path.parent)
    write_atomic(path, pickle, private=True)


def _result_of(call: FunctionCall, payload: CallPayload, run: RunDir, context: DistributedContext) -> Any:
    try:
        return call()
    except StoppedBeforeTraining:
        if context.ranks.world_size == 1:
            _save_resume_call(call, payload, run, context)
        elif _checkpoint_of(call) is not None:
            print(
                f"hpctrain: the ranks stopped at different points, so {call.name}.checkpoint() is not "
                "called, and the function will start over. To stop all ranks at the same point, call "
                "hpctrain.should_stop() in the function, and call sys.exit(75) if the result is True."
            )
        raise
    except SystemExit as exit_request:
        if exit_request.code == EXIT_CONTINUE:
            _save_resume_call(call, payload, run, context)
            raise
        if exit_request.code not in (None, 0):
            raise RuntimeError(f"{call.name}() called sys.exit({exit_request.code!r})") from exit_request
        return None


def _is_final(error: Exception, payload: CallPayload, run: RunDir) -> bool:
    """True if another attempt would fail in the same way."""
    if isinstance(error, UserError):
        return True
    # Another attempt may succeed if a network or a device was the cause, or if there is a saved state: a
    # complete checkpoint of the `Trainer`, or any file of the function.
    may_pass = isinstance(error, (dist.DistError, getattr(torch, "AcceleratorError", ())))
    own_files = (path for path in run.checkpoints.glob("*") if not path.name.startswith((".", "step-")))
    has_checkpoint = any(True for _ in chain(committed_steps(run.checkpoints), own_files))
    return not (payload.retry_on_exception or may_pass or run.resume_call.exists() or has_checkpoint)


def _checkpoint_of(call: FunctionCall) -> Callable[..., Any] | None:
    methods = (getattr(call.function, name, None) for name in ("__submitit_checkpoint__", "checkpoint"))
    return next(filter(None, methods), None)


def _save_resume_call(
    call: FunctionCall, payload: CallPayload, run: RunDir, context: DistributedContext
) -> None:
    """Collective. Get the function's call for the next attempt, and write it on rank 0."""
    if (checkpoint := _checkpoint_of(call)) is None:
        return
    with capture_stop_signals():  # Further stop signals must wait.
        next_call = checkpoint(*call.args, **call.kwargs)
        if context.ranks.is_main and next_call is None:
            print(f"hpctrain: {call.name}.checkpoint() returned None, so the run ends.")
            run.cancel_request.touch(0o644)
        elif context.ranks.is_main:
            following = FunctionCall(next_call.function, tuple(next_call.args), dict(next_call.kwargs))
            replace(payload, call=following.to_bytes()).write(run.resume_call)
        if dist.is_initialized():
            context.barrier()


if __name__ == "__main__":
    from hpctrain.runtime import function_worker

    function_worker.main()
