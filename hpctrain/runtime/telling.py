"""What a rank tells its supervisor of itself: with every heartbeat, and when the run hangs.

It does so in a thread of its own, so that it can while the training waits for other ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cluster import Ranks
from hpctrain.cluster.devices import visible_devices
from hpctrain.files import write_atomic
from hpctrain.rundir import RunDir
from hpctrain.runtime.line import Line, Message
from hpctrain.runtime.pulse import pulse
from hpctrain.runtime.waiting import changed_variables, slow_modules
from hpctrain.telemetry.gpus import GpuReader

#: Modules in which a rank waits for others, or for a device that does.
_EXCHANGING = (
    *("torch.distributed", "torch.autograd", "torch.nn.parallel", "torch.cuda"),
    *("hpctrain.training.report", "hpctrain.runtime.process_group", "hpctrain.checkpoint.agreement"),
)
#: What lies between the user's code and a wait says little about where the training is.
_LIBRARIES = ("torch.", "hpctrain.", "lightning.", "pytorch_lightning.", "accelerate.")


def beat(started_with: Mapping[str, str]) -> Message:
    """A heartbeat.

    Args:
        started_with: the environment before the script began.
    """
    return {
        "phase": pulse.phase,
        "step": pulse.step,
        "beats": pulse.beats,
        "spent": [round(seconds, 4) for seconds in (pulse.data_s, pulse.compute_s, pulse.exchange_s)],
        "modules": slow_modules(sys.modules),
        "changed": changed_variables(started_with, os.environ),
    }


def tell(run: RunDir, attempt: int, ranks: Ranks, line: Line) -> None:
    """Tell where the main thread is, and write down what else there is to know of this rank.

    What is written comes second: it may be the file system that hangs.

    Raises:
        OSError: the supervisor is gone.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    line.send({"told": {"phase": pulse.phase, "step": pulse.step, **place_of(frame)}})
    with suppress(OSError):
        run.failures.mkdir(exist_ok=True)
        with open(run.stacks(attempt, ranks.rank), "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        if (collectives := _flight_record()) is not None:
            write_atomic(run.collectives(attempt, ranks.rank), collectives)
        if ranks.local_rank == 0 and (gpus := _gpus()):
            write_atomic(run.hung_gpus(attempt, ranks.node_rank), json.dumps(gpus, indent=1) + "\n")
    line.send({"written": True})


def place_of(frame: FrameType | None) -> dict[str, Any]:
    """Where a thread is: the innermost line of the user's, and whether it waits for other ranks."""
    innermost, place, waits = frame, None, False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if frame is innermost:
            waits = _is_in(module, _EXCHANGING)
        if place is None and not (module + ".").startswith(_LIBRARIES):
            place = _words(frame)
        frame = frame.f_back
    return {"place": place or (_words(innermost) if innermost else "nowhere"), "waits": waits}


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _words(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _flight_record() -> str | None:
    """What torch has recorded of collectives, in JSON; None where it has recorded nothing."""
    if "torch.distributed" not in sys.modules:
        return None
    from torch._C import _distributed_c10d as c10d

    # Its name until torch 2.12 was NCCL's alone.
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
