"""Explain why Slurm keeps a job pending or rejects it."""

from __future__ import annotations

import re

#: The reason of a job whose dependency can no longer be satisfied.
DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"

#: Reasons of squeue(1), section JOB REASON CODES.
PENDING_REASONS = {
    "AccountNotAllowed": "the partition does not allow this account; use another --account or --partition",
    "AccountingPolicy": "the accounting database does not allow the job; contact an administrator",
    "BadConstraints": "no node meets the constraints of the job; change --constraint or --nodelist",
    "BeginTime": "waiting for its start time",
    "BurstBufferOperation": "the burst buffer of the job failed; contact an administrator",
    "BurstBufferResources": "waiting for space in the burst buffer",
    "BurstBufferStageIn": "the burst buffer is copying the files of the job",
    "Cleaning": "Slurm is still cleaning up after the previous start of the job",
    "DeadLine": "the job can no longer end before its --deadline",
    "Dependency": "waiting for another job to end",
    DEPENDENCY_NEVER_SATISFIED: "the job will never start because its dependency can no longer be satisfied",
    "FedJobLock": "waiting for the other clusters of the federation",
    "InvalidAccount": "the account is invalid; list yours with `sacctmgr show assoc user=$USER`",
    "InvalidQOS": "the QOS is invalid; list yours with `sacctmgr show assoc user=$USER format=qos`",
    "JobArrayTaskLimit": "the array is already running its maximum number of tasks",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user; use `scontrol release {job_id}` to release the job",
    "JobHoldMaxRequeue": "requeued too often; use `scontrol release {job_id}` to release the job",
    "JobLaunchFailure": "the nodes failed to start the job; contact an administrator",
    "Licenses": "waiting for a license",
    "MaxMemPerLimit": "the job requests more memory per CPU or node than allowed; use a smaller --mem",
    "NodeDown": "a node that the job needs is down",
    "None": "Slurm has not yet considered the job",
    "PartitionConfig": "the job requests something that the partition does not allow",
    "PartitionDown": "the partition is down, so its pending jobs do not start",
    "PartitionInactive": "the partition is inactive, so its pending jobs do not start",
    "PartitionNodeLimit": "the partition does not allow this number of nodes, or requested nodes are down",
    "PartitionTimeLimit": "the time limit of the job exceeds the limit of its partition",
    "Priority": "jobs with a higher priority are waiting",
    "Prolog": "the prolog of the site is still running on the nodes",
    "QOSNotAllowed": "the partition does not allow this QOS; use another --qos or --partition",
    "QOSUsageThreshold": "the usage of the account is above the threshold of the QOS",
    "ReqNodeNotAvail": "a requested node is unavailable: in use, reserved or down",
    "Reservation": "waiting for the start of its reservation",
    "ReservationDeleted": "the reservation of the job was deleted",
    "Resources": "waiting for nodes, CPUs or other resources to become free",
    "SchedDefer": "Slurm starts jobs only in its main scheduling cycle (SchedulerParameters=defer)",
    "job_requeue_in_held_state": "requeued and held; use `scontrol release {job_id}` to release the job",
    (
        "launch_failed_requeued_held"
    ): "the nodes failed to start the job; use `scontrol release {job_id}` to try again",
}

#: Names of resources in the reasons below.
_RESOURCES = {
    "BB": "burst buffer space",
    "Billing": "billing units",
    "Cpu": "CPUs",
    "CPU": "CPUs",
    "Energy": "energy",
    "GRES": "GPUs or other GRES",
    "Job": "jobs",
    "License": "licenses",
    "Mem": "memory",
    "Node": "nodes",
    "Resource": "resources",
    "SubmitJob": "submitted jobs",
    "Time": "time",
    "Unknown": "resources",
    "Wall": "time",
}
#: Reasons such as QOSMaxCpuPerUserLimit, AssocGrpGRESMinutes, MaxJobsPerAccount and QOSMinCpuNotSatisfied.
_LIMIT = re.compile(
    r"(?P<owner>QOS|Assoc(?:iation)?|)(?P<kind>Grp|Max|Min|)"
    rf"(?P<resource>{'|'.join(sorted(_RESOURCES, key=len, reverse=True))})(?:ory|s|Duration)?"
    r"(?P<budget>(?:Run)?Minutes)?(?P<per>Per(?:Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)

_SIZE = "The job requests {request}. {offers} Request less, or choose another --partition."
_NO_ACCESS = (
    "The partition may be limited to some users, or require a --reservation. {offers} Choose another "
    "--partition."
)
_ACCOUNTS = "`sacctmgr show assoc user=$USER` lists yours"

#: Remedies by a part of the message with which sbatch rejects a job (slurm_errno.c).
REMEDIES = {
    "Invalid partition name": "{partition_hint}",
    "No partition specified": "Use --partition. {partition_hint}",
    "Required partition not available": "Choose another --partition, or wait.",
    "not permitted to use this partition": _NO_ACCESS,
    "Access/permission denied": _NO_ACCESS,
    "node configuration is not available": _SIZE,
    "Node count specification invalid": _SIZE,
    "More processors requested": _SIZE,
    "Memory required by task": _SIZE,
    "generic resource (gres) specification": _SIZE,
    "Invalid feature specification": "Choose from the features of the nodes (--constraint): {features}.",
    "Invalid node name": "Correct --nodelist or --exclude: {offers}",
    "nodes not in this partition": "Correct --nodelist, or choose another --partition. {offers}",
    "Requested time limit is invalid": "{offers} Use a --time within the limit.",
    "Invalid job array": "The highest task number at this site is {last_task} (MaxArraySize). Use smaller "
    "numbers, or submit several arrays.",
    "Invalid account": f"Use another --account or --partition; {_ACCOUNTS}.",
    "Invalid qos": f"Use another --qos; {_ACCOUNTS[:-7]} format=qos` lists yours.",
    "unrecognized option": "{option_hint}",
    "reservation": "Use another --reservation; `scontrol show reservation` lists them.",
}


def explain_reason(reason: str, job_id: str) -> str:
    """Return the reason, followed by an explanation, if any."""
    name = reason.partition(",")[0]
    explanation = PENDING_REASONS.get(name) or _explain_limit(name)
    return reason if explanation is None else f"{reason}: {explanation.format(job_id=job_id)}"


def suggest_remedy(refusal: str) -> str:
    """Return sentences on the remedy for a job that Slurm rejects."""
    for name in re.findall(r"\w+", refusal):
        if explanation := _explain_limit(name):
            wait = "Wait until other jobs have ended" if "SubmitJob" in name else "Request less"
            return f"{explanation[0].upper()}{explanation[1:]}. {wait}, or use another --qos or --account."
    return "Correct the options, then try again."


def _explain_limit(name: str) -> str | None:
    """Explain the limit of a QOS, an association or an account; None if the reason is not such a limit."""
    match = _LIMIT.fullmatch(name)
    if match is None or not (match["owner"] or match["kind"]):
        return None
    is_qos = not match["owner"].startswith("Assoc")
    owner, table = ("the QOS", "qos") if is_qos else ("your association", "assoc user=$USER")
    resource, per = _RESOURCES[match["resource"]], match["per"] or ""
    if match["kind"] == "Min":
        explanation = f"the job requests less than the minimum of {owner} for {resource}"
    elif per in ("PerJob", "PerNode"):
        explanation = f"the job requests more {resource} per {per[3:].lower()} than {owner} allows"
    elif match["budget"]:
        explanation = f"the budget of {owner} for {resource} is used up"
    elif match["resource"] == "SubmitJob":
        explanation = f"there are as many submitted jobs as {owner} allows (each array task counts as a job)"
    else:
        owners = {"PerUser": "your running jobs", "PerAccount": "the running jobs of the account"}
        running = owners.get(per, "the running jobs")
        explanation = f"together with {running}, the job exceeds the limit of {owner} for {resource}"
    return f"{explanation}; `sacctmgr show {table}` lists the limits"
