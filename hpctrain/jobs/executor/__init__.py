"""Functions as jobs, through submitit's interface: an executor submits them, a job has their results.

Only the interface is submitit's. A job is a run like any other, in a folder of its own and under the same
supervisor; `hpctrain.jobs.functions` submits it and reads what it left.
"""

from hpctrain.jobs.executor.job import Job, JobCancelled, JobFailed
from hpctrain.jobs.executor.submission import Executor

__all__ = ["Executor", "Job", "JobCancelled", "JobFailed"]
