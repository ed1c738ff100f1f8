"""Hold the activity of this rank: attributes set by the training in every step, and read by the heartbeat."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpctrain.record_types import RankPhase
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

#: Libraries that exchange gradients without torch's process groups.
_OTHER_COMMUNICATION = ("horovod", "mpi4py")


class RankActivity:
    """Current phase and progress of a rank.

    Attributes:
        step: steps trained in this process, or calls of `should_stop`.
        progress_count: increases with any progress.
        data_s: seconds spent waiting for data since training began.
        compute_s: seconds of computation, as far as they can be separated from the rest.
        exchange_s: seconds of communication with other ranks, including waiting for them.
        timed_steps: steps that `compute_s` and `exchange_s` contain; None if they contain all steps.
        measured_steps: the measured ones of these, which represent the others; None if all were measured.
        is_managed: true if a `Trainer` or `session` sets these attributes.
        optimizer_steps: optimizer steps of this process, as counted by the step hook.
        logs_metrics: true if the script logs its metrics itself (`hpctrain.log_metrics`).
        restored_steps: steps in the state that a script without the `Trainer` loaded; 0 if it loaded none,
            and None if their number is unknown.
        ignored: settings of the script that the state loaded by its optimizer replaced, until they are
            recorded; None before the first step of a restarted script.
    """

    def __init__(self) -> None:
        self.phase = RankPhase.START
        self.step = self.progress_count = self.optimizer_steps = 0
        self.data_s = self.compute_s = self.exchange_s = 0.0
        self.is_managed = self.logs_metrics = False
        self.restored_steps: int | None = None
        self.ignored: list[Any] | None = None
        self.timed_steps: int | None = None
        self.measured_steps: int | None = None

    def set_phase(self, phase: RankPhase) -> None:
        self.phase = phase
        self.progress_count += 1

    def step_done(self) -> None:
        if not self.step:
            startup_times.end(StartupPart.STEP)
        self.step += 1
        self.progress_count += 1

    @contextmanager
    def in_phase(self, phase: RankPhase) -> Iterator[None]:
        before = self.phase
        self.set_phase(phase)
        try:
            yield
        finally:
            self.set_phase(before)


#: The activity of this process.
activity = RankActivity()


def has_process_group() -> bool:
    """Return true if this process has or had a process group of torch, or communicates in another way."""
    if any(name in sys.modules for name in _OTHER_COMMUNICATION):
        return True
    # torch keeps the address of a group that was destroyed.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return in_process_group() or getattr(c10d, "_default_pg_init_method", None) is not None


def count_ranks(launched: int) -> int | None:
    """Return the number of ranks that train; None if the script destroyed a group that it started itself."""
    if in_process_group():
        return int(sys.modules["torch.distributed.distributed_c10d"].get_world_size())
    return None if launched == 1 and has_process_group() else launched


def in_process_group() -> bool:
    """Return true if this process is in a process group of torch."""
    # Another thread may be importing the module, which then lacks attributes.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    is_initialized = getattr(c10d, "is_initialized", None)
    return is_initialized is not None and is_initialized()
