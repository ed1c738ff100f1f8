"""Define the states of a run, and map Slurm's job states to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from hpctrain.rundir import RunDir


class RunState(StrEnum):
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


#: Meanings of the run states.
RUN_STATES = {
    RunState.PENDING: "The job of the run is waiting in the queue. `hpctrain status RUN` shows the reason.",
    RunState.RUNNING: "The job of the run is starting, running or ending.",
    RunState.COMPLETED: "The run recorded that it is complete.",
    RunState.FAILED: "The run ended with an error. `hpctrain status RUN` shows the cause. "
    "Fix the cause, then use `hpctrain resume RUN` to continue.",
    RunState.CANCELLED: "The run was cancelled. To continue, use `hpctrain resume RUN`.",
    RunState.STOPPED_EARLY: "The sweep stopped this trial, because other trials were better. "
    "This counts as a success.",
    RunState.UNKNOWN: "The scheduler gives no definite answer, and the run has not recorded its end. "
    "It may still be running.",
}


class JobRecord(Struct, frozen=True):
    """A submitted job, as recorded by the run."""

    job_id: str
    run: RunDir
    #: Time of submission in seconds since the epoch.
    submitted: float = 0.0
    #: The final job state as reported by the scheduler, if observed.
    observed_state: str | None = None


class JobStateView(Struct, frozen=True):
    state: RunState
    #: Details beyond the state: the pending reason, or why the scheduler cannot be queried.
    words: str = ""
    #: The job waits only for the end of Slurm's requeue delay.
    held: bool = False
    #: Name of the state in the scheduler, such as TIMEOUT.
    job_state: str | None = None


class SlurmState(NamedTuple):
    state: RunState
    """State of the run."""
    code: str
    """Compact form; empty if Slurm has none."""
    meaning: str


#: Job states of squeue(1) and sacct(1), section JOB STATE CODES, by the state of the run.
_JOB_STATES = {
    RunState.PENDING: {
        "PENDING": ("PD", "The job is waiting in the queue."),
        "REQUEUED": ("RQ", "The job ended, and Slurm is requeueing it."),
        "REQUEUE_FED": ("RF", "The federation of clusters is requeueing the job."),
        "REQUEUE_HOLD": ("RH", "The job was requeued and is held. Use `scontrol release JOB` to release it."),
        "RESV_DEL_HOLD": ("RD", "The job is held because its reservation was deleted. Submit it again."),
        "SPECIAL_EXIT": (
            "SE",
            (
                "The site requeued and held the job because of its exit code. Use `scontrol release JOB` to "
                "release it."
            ),
        ),
    },
    RunState.RUNNING: {
        "CONFIGURING": ("CF", "The nodes are allocated, but are still booting."),
        "COMPLETING": ("CG", "The job is ending. Some nodes are still running its processes or the epilog."),
        "EXPEDITING": ("", "Slurm is requeueing the job, and gives it the highest priority."),
        "LAUNCH_FAILED": ("", "A node failed to start the job."),
        "POWER_UP_NODE": ("", "The nodes of the job are being powered up."),
        "RECONFIG_FAIL": ("", "A node could not be reconfigured for the job."),
        "RESIZING": ("RS", "The job is about to change size."),
        "RUNNING": ("R", "The job is running on its nodes."),
        "SIGNALING": ("SI", "Slurm is sending a signal to the job."),
        "STAGE_OUT": ("SO", "The burst buffer is copying the output files of the job."),
        "STOPPED": ("ST", "The job was stopped with SIGSTOP. Its CPUs remain allocated."),
        "SUSPENDED": ("S", "The job is suspended. Its CPUs are free for other jobs until it resumes."),
        "UPDATE_DB": ("", "Slurm is updating the database record of the job."),
    },
    RunState.COMPLETED: {"COMPLETED": ("CD", "The batch script exited with code 0.")},
    RunState.CANCELLED: {
        "CANCELLED": ("CA", "A user or an administrator cancelled the job."),
        "REVOKED": ("RV", "Another cluster of the federation started the job."),
    },
    RunState.FAILED: {
        "BOOT_FAIL": ("BF", "A node of the job failed to boot. Submit the job again."),
        "DEADLINE": ("DL", "The job reached the deadline of its --deadline option."),
        "FAILED": ("F", "The batch script exited with a nonzero code. `hpctrain logs RUN` shows why."),
        "NODE_FAIL": ("NF", "A node of the job failed, and the job was not requeued."),
        "OUT_OF_MEMORY": ("OOM", "The job needed more memory than it requested. Request more with --mem."),
        "PREEMPTED": ("PR", "A job with a higher priority took the nodes, and this job was not requeued."),
        "TIMEOUT": ("TO", "The job reached its time limit. Request more with --time."),
    },
}
SLURM_STATES = {
    name: SlurmState(state, *entry)
    for state, entries in _JOB_STATES.items()
    for name, entry in entries.items()
}

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


def base_state(text: str) -> str:
    """Return the state from Slurm's output, such as `CANCELLED by 1000` or `CANCELLED+`."""
    return text.split()[0].rstrip("+") if text.strip() else ""


def parse_job_state(text: str) -> RunState:
    """Return the run state for a job state such as `RUNNING` or `CANCELLED by 1000`."""
    state = SLURM_STATES.get(base_state(text))
    return state.state if state else RunState.UNKNOWN


def combine_states(states: Iterable[RunState]) -> RunState:
    """Return the combined state of several parts: active while any part is, failed if any part failed."""
    distinct = set(states)
    return next((state for state in _PRECEDENCE if state in distinct), RunState.UNKNOWN)


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
    explanations = sorted({view.words for view in views if view.words})
    return JobStateView(
        state,
        "; ".join([f"{len(views)} parts: {describe_counts(count_states(states))}", *explanations]),
        held=any(view.held for view in views),
        job_state=next(view.job_state for view in views if view.state is state),
    )
