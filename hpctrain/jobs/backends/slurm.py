"""Jobs on a Slurm cluster, through sbatch, squeue, sacct, scancel and scontrol."""

from __future__ import annotations

import shlex
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends.backend import PreflightResult, SubmissionUnconfirmed
from hpctrain.jobspec.job_directives import job_directives
from hpctrain.jobspec.job_spec import BackendName, JobSpec
from hpctrain.rundir import RunDir
from hpctrain.slurm.command import is_answer_lost, is_transient, run_all
from hpctrain.slurm.config import SiteAnswers, query_site
from hpctrain.slurm.environment import sbatch_env, strip_job_env
from hpctrain.slurm.job_requests import cancel_jobs, signal_batch, signal_ranks, submit_job, update_job
from hpctrain.slurm.states import JobRecord, JobStateView

if TYPE_CHECKING:
    from hpctrain.slurm.site_facts import Site, SiteConventions


class SlurmBackend:
    name: ClassVar[BackendName] = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._outer = strip_job_env(environ)
        self._answers: SiteAnswers | None = None
        self._site: tuple[Site, list[str]] | None = None
        self._trouble: str | None = None

    def unavailable_reason(self, meanwhile: Callable[[], object] = bool) -> str | None:
        """Return a short reason why Slurm cannot be used on this machine; None if Slurm responds."""
        if shutil.which("sbatch", path=self._environ.get("PATH")) is None:
            self._trouble = "sbatch not found on PATH"
            return self._trouble
        # The caller is about to submit, which requires all of these answers.
        calls = query_site(self._outer)
        meanwhile()
        (probe,) = run_all(calls[:1])
        if isinstance(probe, SchedulerError):
            self._trouble = str(probe)
        else:
            self._trouble, self._answers = None, [probe, *run_all(calls[1:])]
        return self._trouble

    def site(self, habits: SiteConventions) -> Site | None:
        return None if self._answers is None else self.site_with_gaps(habits)[0]

    def site_with_gaps(self, habits: SiteConventions) -> tuple[Site, list[str]]:
        """Return the site, and a note on each query that failed."""
        if self._site is None:
            from hpctrain.slurm.site_facts import parse_site

            self._site = parse_site(self._answers or run_all(query_site(self._outer)), habits)
        return self._site

    def check(self, spec: JobSpec, script: str, habits: SiteConventions) -> PreflightResult:
        if self._trouble is not None:
            warning = (
                f"Warning: Slurm cannot be used on this machine ({self._trouble}), so the following were not "
                "checked: the partition and its limits, its nodes and GPUs, and whether Slurm would accept "
                "the job."
            )
            unknown = {
                "the CPUs per rank (--cpus-per-task)": spec.cpus_per_task or spec.program == "batch" or None,
                "the default time limit (--time)": spec.time_limit_s,
            }
            if names := " and ".join(name for name, value in unknown.items() if value is None):
                warning += f" Also unknown: {names}."
            return PreflightResult((warning,))
        # Imported here because only submissions use it.
        from hpctrain.jobs.backends.site_check import preflight_slurm

        return preflight_slurm(spec, script, self._environ, *self.site_with_gaps(habits))

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002 (the queue is the lock)
        environ = sbatch_env(self._environ, job_directives(spec))
        try:
            return submit_job([str(run.job_script)], environ)
        except SchedulerError as error:
            if is_answer_lost(str(error)):
                raise SubmissionUnconfirmed(
                    f"Cannot determine whether the job was submitted: {error}. Check with `squeue --me "
                    f"--name={shlex.quote(spec.name)}`. If the job is queued, its run folder "
                    f"is {str(run.path)!r}. Otherwise, submit again with the same --run-dir."
                ) from error
            if is_transient(str(error)):
                raise SchedulerError(f"The job was not submitted: {error}. Try again later.") from error
            from hpctrain.jobs.backends.job_request import JobRequest
            from hpctrain.jobs.backends.site_check import explain_refusal
            from hpctrain.slurm.site_facts import Site

            site = self._site[0] if self._site else Site()
            reason = explain_refusal(str(error), JobRequest.from_spec(spec, self._environ), site)
            raise SchedulerError(f"The job was not submitted: {reason}") from error

    def query(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
        from hpctrain.slurm.job_status import query_jobs

        return query_jobs(jobs, self._outer)

    def cancel(self, jobs: Sequence[JobRecord]) -> None:
        cancel_jobs([job.job_id for job in jobs], self._outer)

    def requeue(self, jobs: Sequence[JobRecord]) -> None:
        # The ranks save and exit; the supervisor detects that and requests the requeue.
        scripts = [job.job_id for job in jobs if job.run.is_batch]
        if ranks := [job.job_id for job in jobs if job.job_id not in scripts]:
            signal_ranks(ranks, signal.SIGTERM, self._outer)
        if scripts:
            signal_batch(scripts, signal.SIGTERM, self._outer)

    def release_hold(self, jobs: Sequence[JobRecord]) -> None:
        from hpctrain.slurm.job_status import REQUEUE_DELAY_S

        update_job([job.job_id for job in jobs], self._outer, StartTime=f"now+{REQUEUE_DELAY_S}")
