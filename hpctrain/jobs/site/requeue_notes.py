"""Notes on the behavior of a job at a preemption or near the time limit."""

from __future__ import annotations

from hpctrain.slurm.config import SlurmConfig
from hpctrain.slurm.site_facts import Partition, Site
from hpctrain.spec.job_spec import ResumeMode

#: PreemptMode of partitions only applies if jobs are preempted by partition tier (slurm.conf(5)).
_PARTITION_PREEMPTION = "partition_prio"

_RESUBMIT_HINT = "Submit the run again with the same --run-dir to continue."
_SUCCESSOR_NOTE = "continues in a successor job, which starts after the previous job has ended"


def is_partition_preemptible(partition: Partition, site: Site) -> bool:
    """Return true if jobs of another partition can preempt jobs of the partition. QOS are not considered."""
    if (
        site.slurm is None
        or site.slurm.preempt_type != _PARTITION_PREEMPTION
        or partition.preempt_mode == "OFF"
    ):
        return False
    return any(other.priority_tier > partition.priority_tier for other in site.partitions)


def requeue_notes(partition: Partition, site: Site, resume_mode: ResumeMode) -> list[str]:
    """Return notes on requeues for a user who submits to the partition; empty if there are no restrictions.

    Seen with Slurm 22.05: a job with `--requeue` is requeued regardless of JobRequeue. If a preemption
    cancels a job, the supervisor can still requeue the job within the grace time, but not later.
    """
    notes = []
    chained = resume_mode != "requeue"
    if not site.habits.requeue:
        says = "This site does not requeue jobs (requeue: false in the site profile)"
        if chained:
            notes.append(
                f"{says}. A run that is preempted or approaches its time limit saves its state and "
                f"{_SUCCESSOR_NOTE}."
            )
        else:
            notes.append(
                f"{says}. A run that is preempted or approaches its time limit saves its state and exits. "
                f"{_RESUBMIT_HINT}"
            )
    elif site.slurm is not None and not site.slurm.job_requeue and resume_mode == "auto":
        notes.append(
            "This site does not requeue jobs by default (JobRequeue=0). A run that is preempted or "
            f"approaches its time limit saves its state and {_SUCCESSOR_NOTE} (--resume-mode)."
        )
    if (
        is_partition_preemptible(partition, site)
        and partition.preempt_mode == "CANCEL"
        and not partition.grace_time_s
    ):
        kill_wait_s = site.slurm.kill_wait_s if site.slurm else SlurmConfig.kill_wait_s
        end = f"{_SUCCESSOR_NOTE}." if chained else f"ends as FAILED. {_RESUBMIT_HINT}"
        notes.append(
            f"A preempted job in partition {partition.name} is cancelled immediately, not requeued "
            f"(PreemptMode=CANCEL, GraceTime=0). The run has {kill_wait_s:g} s to save "
            f"(KillWait), and then {end}"
        )
    return notes
