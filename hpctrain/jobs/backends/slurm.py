"""Jobs on a Slurm cluster, through sbatch, squeue, sacct, scancel and scontrol."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends import PreflightResult, SubmissionUnconfirmed
from hpctrain.rundir import RunDir
from hpctrain.slurm.command import COMMAND_LIMIT_S, is_answer_lost, list_rank_steps, run_all, run_slurm
from hpctrain.slurm.environment import sbatch_env, strip_job_env
from hpctrain.slurm.site_queries import SiteAnswers, query_site
from hpctrain.spec.directives import all_directives
from hpctrain.spec.job_spec import BackendName, JobSpec

if TYPE_CHECKING:
    from hpctrain.records.run_record import JobRecord
    from hpctrain.slurm.site_facts import Site
    from hpctrain.slurm.states import JobStateView

#: Seconds for a probe: a busy or restarting controller answers late, which is not worth the wait.
_PROBE_TIMEOUT_S = 5

#: Seconds to look for a step to signal: steps start and end in between.
_STEP_LIMIT_S = 3.0


class SlurmBackend:
    """Jobs on a Slurm cluster."""

    name: ClassVar[BackendName] = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._outer = strip_job_env(environ)
        self._answers: SiteAnswers | None = None
        """Slurm's answers about the site."""

    def trouble(self) -> str | None:
        """Return briefly why Slurm cannot be used here; None if it answers."""
        if shutil.which("sbatch", path=self._environ.get("PATH")) is None:
            return "sbatch not found on PATH"
        # The caller is about to submit, and then needs all of these answers.
        questions = query_site(self._outer)
        # Import the checks while Slurm answers.
        import hpctrain.jobs.backends.preflight_slurm  # noqa: F401

        try:
            self._answers = run_all(questions, probe_s=_PROBE_TIMEOUT_S)
        except SchedulerError as error:
            return str(error)
        return None

    def check(self, spec: JobSpec, script: str, profile: Site) -> PreflightResult:
        # Imported here because only a submission needs it.
        from hpctrain.jobs.backends.preflight_slurm import preflight_slurm

        return preflight_slurm(spec, script, self._environ, profile, self._answers)

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002 (the queue is the lock)
        environ = sbatch_env(self._environ, all_directives(spec))
        try:
            answer = run_slurm(["sbatch", "--parsable", str(run.job_script)], environ)
        except SchedulerError as error:
            if is_answer_lost(str(error)):
                raise SubmissionUnconfirmed(
                    f"It is unknown if the job was submitted: {error}. Check with "
                    f"`squeue --me --name={shlex.quote(spec.name)}`. If the job is queued, leave it: the run "
                    f"continues in {str(run.path)!r}. Otherwise, submit again with this --run-dir."
                ) from error
            raise SchedulerError(
                f"The job was not submitted: {error}. "
                "Nothing is queued. Correct the options that Slurm reports and submit again."
            ) from error
        # In a multi-cluster setup the answer is `job;cluster`.
        return answer.strip().splitlines()[-1].split(";")[0]

    def look(self, jobs: Sequence[JobRecord]) -> list[JobStateView]:
        from hpctrain.jobs.backends.slurm_status import query_jobs

        return query_jobs(jobs, self._outer)

    def cancel(self, jobs: Sequence[JobRecord]) -> None:
        self._run(["scancel", *(job.job_id for job in jobs)])

    def requeue(self, jobs: Sequence[JobRecord]) -> None:
        # The ranks save and exit; the supervisor detects that and requests the requeue. Signal steps, not
        # jobs: while other tasks of an array are pending, Slurm 22.05 refuses after it has sent the signal,
        # and scancel repeats it for a minute.
        left = {job.job_id for job in jobs}
        tried: dict[str, str] = {}
        deadline = time.monotonic() + _STEP_LIMIT_S
        while left and time.monotonic() < deadline:
            steps = {step.rpartition(".")[0]: step for step in list_rank_steps(sorted(left), self._outer)}
            left -= {job for job, step in tried.items() if steps.get(job) != step}
            steps = {job: step for job, step in steps.items() if job in left}
            try:
                if steps:
                    self._run(["scancel", "--signal=TERM", *steps.values()])
                    left -= steps.keys()
            except SchedulerError as error:
                # scancel signals twice; the second time the step may be gone.
                if "Invalid job id" not in str(error):
                    raise
                tried = steps
            if left:
                time.sleep(0.2)
        if left:
            others = " The other jobs have been signalled." if len(left) < len(jobs) else ""
            raise SchedulerError(
                f"No rank of job {', '.join(sorted(left))} is running: the ranks are being started, or have "
                f"just exited. Try again in a few seconds.{others}"
            )

    def lift_hold(self, jobs: Sequence[JobRecord]) -> None:
        from hpctrain.jobs.backends.slurm_status import REQUEUE_DELAY_S

        named = ",".join(job.job_id for job in jobs)
        self._run(["scontrol", "update", f"JobId={named}", f"StartTime=now+{REQUEUE_DELAY_S}"])

    def _run(self, command: Sequence[str], *, timeout_s: float = COMMAND_LIMIT_S) -> str:
        return run_slurm(command, self._outer, timeout_s=timeout_s)
