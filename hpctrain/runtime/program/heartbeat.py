"""Report a rank's progress to its supervisor with every heartbeat, and its stacks when the run hangs."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cluster import Ranks
from hpctrain.cluster.visible_gpus import visible_devices
from hpctrain.files import make_folder, own_file, write_atomic
from hpctrain.record_types import RankPhase
from hpctrain.rundir import RunDir
from hpctrain.runtime.program.script_monitor import find_rendezvous, outer_frames, waits_for_ranks
from hpctrain.runtime.program.step_profiler import step_profiler
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.agreed_stop import agreed_stop
from hpctrain.runtime.stopping.stop_signals import handles_stop_signals, raise_stop_signal
from hpctrain.runtime.supervisor_connection import Connection, Message
from hpctrain.telemetry.sampling.nvml import GpuReader
from hpctrain.telemetry.startup_parts import startup_times

#: Modules with slow imports.
_SLOW_MODULES = (
    *("numpy", "torch", "torch._dynamo", "torch._inductor.compile_fx"),
    *("torch.distributed.checkpoint", "hpctrain.training.trainer"),
    *("lightning.pytorch", "pytorch_lightning", "accelerate", "transformers", "torchvision"),
)
#: Variables that PyTorch, Lightning and hpctrain set themselves.
_SET_BY_IMPORTS = frozenset(
    {"GLOO_SOCKET_IFNAME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING"}
    | {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "PYTORCH_NVML_BASED_CUDA_CHECK"}
)
#: Modules whose frames between the user's code and a wait are skipped in the reported position.
_LIBRARIES = ("torch.", "hpctrain.", "lightning.", "pytorch_lightning.", "accelerate.")


def heartbeat_message(started_with: Mapping[str, str]) -> Message:
    startup = startup_times.report()
    return {
        **({"stop": True} if agreed_stop.signal else {}),
        **({} if startup is None else {"startup": startup}),
        "phase": RankPhase.JOIN if _rendezvous() else activity.phase,
        "step": activity.step,
        "beats": activity.progress_count,
        "spent": [
            round(seconds, 4) for seconds in (activity.data_s, activity.compute_s, activity.exchange_s)
        ],
        "timed": [
            activity.step if steps is None else steps
            for steps in (activity.timed_steps, activity.measured_steps)
        ],
        "modules": [name for name in _SLOW_MODULES if name in sys.modules],
        "changed": changed_variables(started_with, os.environ),
    }


def changed_variables(before: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    names = before.keys() | environ.keys()
    return sorted({name for name in names if before.get(name) != environ.get(name)} - _SET_BY_IMPORTS)


def on_message(run: RunDir, attempt: int, ranks: Ranks, connection: Connection, message: Message) -> None:
    if "tell" in message:
        report_diagnostics(run, attempt, ranks, connection)
    elif "prepare_stop" in message:
        # A script with its own signal handlers decides when to exit.
        step = agreed_stop.prepare() if handles_stop_signals() else None
        connection.send({"can_stop_after": step})
    elif "stop_signal" in message:
        raise_stop_signal(signal.Signals[message["stop_signal"]])
    elif "stop_after" in message:
        agreed_stop.stop_after(message["stop_after"])
    elif "profile" in message:
        step_profiler.request(run, ranks.rank, message["profile"])


def report_diagnostics(run: RunDir, attempt: int, ranks: Ranks, connection: Connection) -> None:
    """Report the position of the main thread, then write the stacks and other diagnostics to files.

    The report comes first, because the file system may be the part that hangs.
    """
    rendezvous = _rendezvous()
    position = {
        "phase": RankPhase.JOIN if rendezvous else activity.phase,
        "step": activity.step,
        "rendezvous": rendezvous,
        **describe_frame(_main_frame()),
    }
    connection.send({"told": position})
    with suppress(OSError):
        make_folder(run.failures)
        with open(run.stacks(attempt, ranks.rank), "w", encoding="utf-8", opener=own_file) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if (collectives := _flight_record()) is not None:
            write_atomic(run.collectives(attempt, ranks.rank), collectives)
        if ranks.local_rank == 0 and (gpus := _gpus()):
            write_atomic(run.hung_gpus(attempt, ranks.node_rank), json.dumps(gpus, indent=1) + "\n")
    connection.send({"written": True})


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _rendezvous() -> str | None:
    return find_rendezvous(_main_frame(), os.environ) if activity.phase == RankPhase.START else None


def describe_frame(frame: FrameType | None) -> dict[str, Any]:
    """Return a thread's innermost line of user code, and True if it waits for other ranks."""
    if frame is None:
        return {"place": "nowhere", "waits": False}
    for shown in outer_frames(frame):
        if not f"{shown.f_globals.get('__name__')}.".startswith(_LIBRARIES):
            break
    else:
        shown = frame
    place = f"{shown.f_code.co_name} ({Path(shown.f_code.co_filename).name}:{shown.f_lineno})"
    return {"place": place, "waits": waits_for_ranks(frame)}


def _flight_record() -> str | None:
    """Return torch's record of collectives as JSON; None if it is empty."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # Before torch 2.12, the function existed only for NCCL, under another name.
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return None
    try:
        record = dump()
    except RuntimeError:
        return None
    text = record.decode() if isinstance(record, bytes) else str(record)
    return text if json.loads(text).get("entries") else None


def _gpus() -> list[dict[str, Any]]:
    with GpuReader(visible_devices(os.environ)) as reader:
        return [
            {"name": name, **vars(reading)}
            for name, reading in zip(reader.names, reader.read(), strict=False)
        ]
