"""Explanations of Slurm's pending reasons."""

from __future__ import annotations

#: The reason of a job whose dependency can no longer be satisfied.
DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"

#: Reasons of squeue(1), section JOB REASON CODES, that need action or are not self-explanatory.
_REASONS = {
    "BeginTime": "waiting for its start time",
    "Dependency": "waiting for another job to end",
    DEPENDENCY_NEVER_SATISFIED: "it will never start: a job that it depends on did not end as required",
    "JobArrayTaskLimit": "the array already runs its maximum number of tasks",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user; `scontrol release {job_id}` releases it",
    "JobLaunchFailure": "its nodes failed to start it; contact an administrator",
    "PartitionDown": "its partition currently starts no jobs",
    "PartitionNodeLimit": "it requests more nodes than its partition allows",
    "PartitionTimeLimit": "it requests more time than its partition allows",
    "Priority": "other jobs have higher priority",
    "ReqNodeNotAvail": "a requested node is down or reserved",
    "Resources": "it is next in line, waiting for free resources",
    "job_requeue_in_held_state": "requeued and held; `scontrol release {job_id}` releases it",
    "launch_failed_requeued_held": "its nodes failed to start it; `scontrol release {job_id}` tries again",
}


def explain_reason(reason: str, job_id: str) -> str:
    """Return the reason, followed by an explanation if there is one."""
    words = _REASONS.get(reason.partition(",")[0])
    return reason if words is None else f"{reason}: {words.format(job_id=job_id)}"
