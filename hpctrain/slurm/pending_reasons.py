"""Explanations of Slurm's pending reasons."""

from __future__ import annotations

#: The reason of a job whose dependency can no longer be satisfied.
DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"

#: Reasons of squeue(1), section JOB REASON CODES, that need action or are not self-explanatory.
_REASONS = {
    "BeginTime": "waiting for its start time",
    "Dependency": "another job has to end first",
    DEPENDENCY_NEVER_SATISFIED: "a job that it depends on has not ended as it was to: it will never start",
    "JobArrayTaskLimit": "as many tasks of the array as may run at once do",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user; `scontrol release {job_id}` lets it go",
    "JobLaunchFailure": "its nodes could not start it; an administrator has to look",
    "PartitionDown": "its partition takes no jobs at the moment",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "Priority": "others come first",
    "ReqNodeNotAvail": "a node that it asks for is down or reserved",
    "Resources": "it is next, once there is room",
    "job_requeue_in_held_state": "requeued and held; `scontrol release {job_id}` lets it go",
    "launch_failed_requeued_held": "its nodes could not start it; `scontrol release {job_id}` tries again",
}


def explain_reason(reason: str, job_id: str) -> str:
    """Return the reason, followed by an explanation if there is one."""
    words = _REASONS.get(reason.partition(",")[0])
    return reason if words is None else f"{reason}: {words.format(job_id=job_id)}"
