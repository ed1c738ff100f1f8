"""States of a run, and what Slurm's states of a job mean for it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    #: The scheduler cannot be reached: nothing is known, so nothing is claimed.
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)


@dataclass(frozen=True)
class JobView:
    """What the scheduler says about a job."""

    state: RunState
    #: What the scheduler says beyond the state: its reason, or why it cannot be asked.
    words: str = ""
    #: The job waits only for the delay that Slurm puts on a requeued job.
    held: bool = False


# Job states of squeue(1) and sacct(1), section JOB STATE CODES.
_SLURM_STATES = {
    RunState.PENDING: ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    RunState.RUNNING: (
        "CONFIGURING",
        "COMPLETING",
        "EXPEDITING",
        "LAUNCH_FAILED",
        "POWER_UP_NODE",
        "RECONFIG_FAIL",
        "RESIZING",
        "RUNNING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "UPDATE_DB",
    ),
    RunState.COMPLETED: ("COMPLETED",),
    RunState.CANCELLED: ("CANCELLED", "REVOKED"),
    RunState.FAILED: (
        "BOOT_FAIL",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    ),
}
_MEANING = {word: state for state, words in _SLURM_STATES.items() for word in words}


def from_slurm(words: str) -> RunState:
    """What a job state such as `RUNNING` or `CANCELLED by 1000` means for a run.

    A state that is not known here counts as unknown, for newer Slurms have newer states.
    """
    first = words.split()[0].rstrip("+") if words.strip() else ""
    return _MEANING.get(first, RunState.UNKNOWN)
