"""A preemption ends a job, unless the job is only suspended."""

import pytest

from hpctrain.slurm.job_queries import _parse_records

#: The end of a record of Slurm 22.05.
RECORD = """JobId=17 JobName=a
   JobState=RUNNING Reason=None Dependency=(null)
   PreemptEligibleTime=2026-11-29T10:00:00 PreemptTime={preempted}
   SuspendTime={suspended} SecsPreSuspend=0 LastSchedEval=2026-11-29T10:00:00 Scheduler=Main
"""


@pytest.mark.parametrize(
    ("preempted", "suspended", "is_preempted"),
    [
        ("None", "None", False),
        ("2026-11-29T11:00:00", "None", True),
        ("2026-11-29T11:00:00", "2026-11-29T11:00:00", False),
        ("2026-11-29T11:00:00", "2026-11-29T11:30:00", False),
    ],
)
def test_suspended_job_is_not_preempted(preempted, suspended, is_preempted):
    (job,) = _parse_records(RECORD.format(preempted=preempted, suspended=suspended))
    assert job.preempted is is_preempted
