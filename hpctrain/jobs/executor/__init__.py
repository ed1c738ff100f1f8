"""Functions as jobs, with submitit's interface: an executor submits functions, a job returns the results.

Only the interface is from submitit. A job is an ordinary run with a run folder and a supervisor.
"""

from hpctrain.jobs.executor.executor import Executor
from hpctrain.jobs.executor.job import Job, JobCancelled, JobFailed

__all__ = ["Executor", "Job", "JobCancelled", "JobFailed"]
