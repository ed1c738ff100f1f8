"""Run states, and their mapping from Slurm's job states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class RunState(StrEnum):
    """State of a run."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    #: A sweep stopped this trial, because others were better.
    STOPPED_EARLY = "STOPPED_EARLY"
    #: The scheduler gives no definite answer.
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        return self not in (RunState.PENDING, RunState.RUNNING, RunState.UNKNOWN)


@dataclass(frozen=True)
class JobStateView:
    """The scheduler's view of a job."""

    state: RunState
    #: Details beyond the state: the pending reason, or why the scheduler cannot be queried.
    words: str = ""
    #: The job waits only for the end of Slurm's requeue delay.
    held: bool = False
    #: Name of the state in the scheduler, such as TIMEOUT.
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

#: Precedence of states for the combined state of several runs.
_PRECEDENCE = (
    RunState.RUNNING,
    RunState.PENDING,
    RunState.UNKNOWN,
    RunState.FAILED,
    RunState.CANCELLED,
    RunState.COMPLETED,
    RunState.STOPPED_EARLY,
)


def base_state(words: str) -> str:
    """Return the state from Slurm's output, such as `CANCELLED by 1000` or `CANCELLED+`."""
    return words.split()[0].rstrip("+") if words.strip() else ""


def parse_job_state(words: str) -> RunState:
    """Return the run state for a job state such as `RUNNING` or `CANCELLED by 1000`.

    Unrecognized states map to UNKNOWN, because newer Slurm releases add states.
    """
    return _MEANING.get(base_state(words), RunState.UNKNOWN)


def combine_states(states: Iterable[RunState]) -> RunState:
    """Return the combined state of several parts: active while any part is, failed if any part failed."""
    found = set(states)
    return next((state for state in _PRECEDENCE if state in found), RunState.UNKNOWN)


def count_states(states: Iterable[RunState]) -> dict[str, int]:
    """Return the number of runs in each state that occurs, active states first."""
    counts = Counter(states)
    return {str(state): counts[state] for state in _PRECEDENCE if counts[state]}


def describe_counts(counts: dict[str, int]) -> str:
    """Format the counts, as in `3 RUNNING, 17 PENDING`."""
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def combine_views(views: Sequence[JobStateView]) -> JobStateView:
    """Return the view of a job from the views of its parts (array tasks or heterogeneous components)."""
    if len(views) == 1:
        return views[0]
    states = [view.state for view in views]
    state = combine_states(states)
    words = sorted({view.words for view in views if view.words})
    return JobStateView(
        state,
        "; ".join([f"{len(views)} parts: {describe_counts(count_states(states))}", *words]),
        held=any(view.held for view in views),
        job_state=next(view.job_state for view in views if view.state is state),
    )


#: The reason of a job whose dependency can no longer be satisfied.
DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"

#: Reasons of squeue(1), section JOB REASON CODES, that need action or are not self-explanatory.
_REASONS = {
    "BeginTime": "waiting for its start time",
    "Dependency": "waiting for another job to end",
    DEPENDENCY_NEVER_SATISFIED: "the job will never start because its dependency can no longer be satisfied",
    "JobArrayTaskLimit": "the array is already running its maximum number of tasks",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user; use `scontrol release {job_id}` to release the job",
    "JobLaunchFailure": "the nodes failed to start the job; contact an administrator",
    "PartitionDown": "the partition is down, so its pending jobs do not start",
    "PartitionNodeLimit": "the partition does not allow this number of nodes, or requested nodes are down",
    "PartitionTimeLimit": "the time limit of the job exceeds the limit of its partition",
    "Priority": "jobs with a higher priority are waiting",
    "ReqNodeNotAvail": "a requested node is unavailable: in use, reserved or down",
    "Resources": "waiting for nodes, CPUs or other resources to become free",
    "job_requeue_in_held_state": "requeued and held; use `scontrol release {job_id}` to release the job",
    (
        "launch_failed_requeued_held"
    ): "the nodes failed to start the job; use `scontrol release {job_id}` to try again",
}


def explain_reason(reason: str, job_id: str) -> str:
    """Return the reason, followed by an explanation, if any."""
    words = _REASONS.get(reason.partition(",")[0])
    return reason if words is None else f"{reason}: {words.format(job_id=job_id)}"
