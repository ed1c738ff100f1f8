"""What becomes of a job that is preempted here, or that comes near its time limit."""

from __future__ import annotations

from hpctrain.jobs.site.facts import Partition, Site, SlurmConfig
from hpctrain.jobs.spec import ContinueBy

#: Partitions decide by themselves only if jobs are preempted by the tier of their partition (slurm.conf(5)).
_BY_PARTITION = "partition_prio"

_BY_HAND = "Submit it again with the same --run-dir, and it goes on from there."
_CHAINED = "goes on in a successor job, which Slurm starts after the end of the job before it"


def is_preemptible(partition: Partition, site: Site) -> bool:
    """Whether jobs of a partition can lose their nodes to others, as far as partitions decide that."""
    if site.slurm is None or site.slurm.preempt_type != _BY_PARTITION or partition.preempt_mode == "OFF":
        return False
    return any(other.priority_tier > partition.priority_tier for other in site.partitions)


def requeue_notes(partition: Partition, site: Site, continue_by: ContinueBy) -> list[str]:
    """What a user has to know about requeues before he submits to the partition; nothing where all is well.

    Seen with Slurm 22.05: a job that asks for it (`--requeue`) is requeued whatever JobRequeue says. Where a
    preemption cancels, the supervisor can still requeue the job within the grace, and not after it.
    """
    notes = []
    chained = continue_by != "requeue"
    if not site.habits.requeue:
        says = "This site lets no job be requeued (the site's profile says requeue: false)"
        if chained:
            notes.append(
                f"{says}: a run that is preempted or comes near its time limit saves, and {_CHAINED}."
            )
        else:
            notes.append(
                f"{says}: a run that is preempted or comes near its time limit saves, and ends. {_BY_HAND}"
            )
    elif site.slurm is not None and not site.slurm.job_requeue and continue_by == "auto":
        notes.append(
            "This site does not requeue jobs by itself (JobRequeue=0): successors are chained. A run that is "
            f"preempted or comes near its time limit saves, and {_CHAINED} (--continue-by)."
        )
    elif site.slurm is not None and not site.slurm.job_requeue and continue_by == "requeue":
        notes.append(
            "This site requeues only jobs that ask for it (JobRequeue=0). A run does (--requeue), so it goes "
            "on after a preemption, a lost node and its time limit as elsewhere."
        )
    if is_preemptible(partition, site) and partition.preempt_mode == "CANCEL" and not partition.grace_time_s:
        kill_wait_s = site.slurm.kill_wait_s if site.slurm else SlurmConfig.kill_wait_s
        end = f"{_CHAINED}." if chained else f"ends as FAILED. {_BY_HAND}"
        notes.append(
            f"A preempted job of partition {partition.name} is cancelled at once, not requeued "
            "(PreemptMode=CANCEL, GraceTime=0). The run saves if it can do so within "
            f"{kill_wait_s:g} s (KillWait), and {end}"
        )
    return notes
