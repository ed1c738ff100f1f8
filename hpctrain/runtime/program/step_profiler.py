"""Profile a few optimizer steps of this rank, on request while it trains.

The step hook starts and stops torch's profiler in the thread that trains. A background thread writes the
files. An error ends the profile, never the training.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.files import make_folder, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.runtime.rank_activity import activity

#: Number of operators in the result: those that take the most time.
_NUM_OPERATORS = 10


@dataclass(frozen=True)
class _Request:
    run: RunDir
    number: int
    rank: int
    num_steps: int

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result, which `hpctrain profile` waits for."""
        try:
            make_folder(self.run.profile(self.number))
            path = self.run.profile_result(self.number, self.rank)
            write_atomic(path, json.dumps({"rank": self.rank, **result}, indent=1) + "\n", durable=False)
        except OSError as error:
            print(f"hpctrain: cannot write the result of the profile: {error}", file=sys.stderr)

    def write_error(self, error: object) -> None:
        print(f"hpctrain: the requested profile failed: {error}", file=sys.stderr)
        self.write_result({"error": str(error)})


class StepProfiler:
    def __init__(self) -> None:
        self.is_active = False
        """True from a request until the last step of its profile."""
        self.counts_steps = False
        """True if the step hook calls `after_step`."""
        self._request: _Request | None = None
        self._profile: Any = None
        self._first_step, self._started_at = 0, 0.0

    def request(self, run: RunDir, rank: int, message: Mapping[str, Any]) -> None:
        """Start a profile after the current optimizer step."""
        if rank not in message["ranks"]:
            return
        request = _Request(run, message["number"], rank, message["steps"])
        if not self.counts_steps:
            request.write_error(
                "profiling requires the step hook, but HPCTRAIN_STEP_HOOK=0 disables this hook; remove the "
                "variable from the environment of the run"
            )
        elif self.is_active:
            request.write_error("the previous profile of this rank is not complete")
        else:
            self._request, self.is_active = request, True

    def after_step(self) -> None:
        """Start or stop the profiler after an optimizer step."""
        request = self._request
        assert request is not None
        try:
            if self._profile is None:
                self._start()
            elif activity.optimizer_steps - self._first_step >= request.num_steps - 1:
                self._stop(request)
        except Exception as error:  # noqa: BLE001 (reported; the training must continue)
            self._profile, self.is_active = None, False
            request.write_error(f"{type(error).__name__}: {error}")

    def _start(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("the script is already using a PyTorch profiler")
        # If the script uses no GPU, the profiler must not initialize CUDA.
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpu = [ProfilerActivity.CUDA] if uses_gpu else []
        started = profile(activities=[ProfilerActivity.CPU, *gpu])
        started.start()
        # PyTorch crashes if the interpreter ends while a profiler is active.
        atexit.register(self._end)
        self._profile, self._first_step = started, activity.optimizer_steps + 1
        self._started_at = time.perf_counter()

    def _end(self) -> None:
        stopped, self._profile = self._profile, None
        if stopped is not None and self._request is not None:
            with suppress(Exception):
                stopped.stop()
            num_steps = activity.optimizer_steps - self._first_step + 1
            self._request.write_error(
                f"the program ended after {num_steps} of the {self._request.num_steps} requested steps"
            )

    def _stop(self, request: _Request) -> None:
        stopped, self._profile = self._profile, None
        stopped.stop()
        result = {
            "first_step": self._first_step,
            "last_step": activity.optimizer_steps,
            "seconds": round(time.perf_counter() - self._started_at, 6),
        }
        self.is_active = False
        threading.Thread(target=_write, args=(request, stopped, result), daemon=True).start()


def _write(request: _Request, profile: Any, result: dict[str, Any]) -> None:
    try:
        trace = request.run.profile_trace(request.number, request.rank)
        make_folder(trace.parent)
        temporary = trace.with_name(f".{trace.name}")
        profile.export_chrome_trace(str(temporary))
        os.replace(temporary, trace)
        request.write_result({**result, "trace": str(trace), "operators": _operators(profile)})
    except Exception as error:  # noqa: BLE001 (reported)
        request.write_error(f"{type(error).__name__}: {error}")


def _operators(profile: Any) -> list[dict[str, Any]]:
    """Return the operators with the longest own time: on the GPU if there is one, otherwise on the CPU."""
    operators = [
        {
            "name": operator.key,
            "calls": operator.count,
            "cpu_s": operator.self_cpu_time_total / 1e6,
            "gpu_s": operator.self_device_time_total / 1e6,
        }
        for operator in profile.key_averages()
    ]
    operators.sort(key=lambda operator: (operator["gpu_s"], operator["cpu_s"]), reverse=True)
    return operators[:_NUM_OPERATORS]


#: The profiler of this process.
step_profiler = StepProfiler()
