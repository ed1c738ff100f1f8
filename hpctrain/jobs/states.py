"""States of a run, and what Slurm's states of a job mean for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """Where a run stands."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    #: The scheduler gives no sure answer: nothing is known, so nothing is claimed.
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
    #: The scheduler's own word for the state, such as TIMEOUT.
    job_state: str | None = None


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

#: What the states of several runs make together: the first that any of them has.
_PRECEDENCE = (
    RunState.RUNNING,
    RunState.PENDING,
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.CANCELLED,
    RunState.COMPLETED,
)


def first_word(words: str) -> str:
    """The state's own word in what Slurm prints, as in `CANCELLED by 1000` or `CANCELLED+`."""
    return words.split()[0].rstrip("+") if words.strip() else ""


def from_slurm(words: str) -> RunState:
    """What a job state such as `RUNNING` or `CANCELLED by 1000` means for a run.

    A state that is not known here counts as unknown, for newer Slurms have newer states.
    """
    return _MEANING.get(first_word(words), RunState.UNKNOWN)


def overall(states: Iterable[RunState]) -> RunState:
    """The state of what consists of several: it goes on as long as any of them does, and fails with any."""
    found = set(states)
    return next((state for state in _PRECEDENCE if state in found), RunState.UNKNOWN)


def count(states: Iterable[RunState]) -> dict[str, int]:
    """How many there are in each state that occurs, those that go on first."""
    counts = Counter(states)
    return {str(state): counts[state] for state in _PRECEDENCE if counts[state]}


def describe_counts(counts: dict[str, int]) -> str:
    """As in `3 RUNNING, 17 PENDING`."""
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def join_views(views: Sequence[JobView]) -> JobView:
    """The view of a job out of those of its parts: tasks of an array, components of a heterogeneous job."""
    if len(views) == 1:
        return views[0]
    states = [view.state for view in views]
    state = overall(states)
    words = sorted({view.words for view in views if view.words})
    return JobView(
        state,
        "; ".join([f"{len(views)} parts: {describe_counts(count(states))}", *words]),
        held=any(view.held for view in views),
        job_state=next(view.job_state for view in views if view.state is state),
    )
