"""Functions as jobs, through submitit's interface: an executor submits them, a job returns their results.

Only the interface is submitit's. A job is an ordinary run with its own folder and the same supervisor;
`hpctrain.jobs.executor.function_runs` submits it and reads its results.
"""

from hpctrain.jobs.executor.executor import Executor
from hpctrain.jobs.executor.job import Job, JobCancelled, JobFailed

__all__ = ["Executor", "Job", "JobCancelled", "JobFailed"]
