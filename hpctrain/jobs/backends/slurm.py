"""Jobs on a Slurm cluster, through sbatch, squeue, sacct, scancel and scontrol."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends import Outlook, SubmissionUnclear
from hpctrain.jobs.directives import directives_of
from hpctrain.jobs.environment import outer_environment, sbatch_environment
from hpctrain.jobs.site.questions import Answers, ask_site
from hpctrain.jobs.slurm_command import COMMAND_LIMIT_S, answers_to, is_answer_lost, run_slurm, steps_of
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.rundir import RunDir

if TYPE_CHECKING:
    from hpctrain.jobs.record import Job
    from hpctrain.jobs.site.facts import Site
    from hpctrain.jobs.states import JobView

#: A controller that is busy or restarting answers late; a probe is not worth that wait.
_PROBE_TIMEOUT_S = 5

#: Steps begin and end, so one that is to be signalled is looked for more than once.
_STEP_LIMIT_S = 3.0


class SlurmBackend:
    """Jobs on a Slurm cluster."""

    name: ClassVar[BackendName] = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._outer = outer_environment(environ)
        self._answers: Answers | None = None
        """What Slurm says of the site."""

    def trouble(self) -> str | None:
        """Why Slurm cannot be used here, in a few words; None where it answers."""
        if shutil.which("sbatch", path=self._environ.get("PATH")) is None:
            return "there is no sbatch on the PATH"
        # Whoever asks is about to submit, and then all of this is wanted.
        questions = ask_site(self._outer)
        # What judges the answers is imported while they are on their way.
        import hpctrain.jobs.lint_site  # noqa: F401

        try:
            self._answers = answers_to(questions, probe_s=_PROBE_TIMEOUT_S)
        except SchedulerError as error:
            return str(error)
        return None

    def check(self, spec: JobSpec, script: str, profile: Site) -> Outlook:
        # Only a submission needs all of this.
        from hpctrain.jobs.lint_site import lint_site

        return lint_site(spec, script, self._environ, profile, self._answers)

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002 (the queue is the lock)
        environ = sbatch_environment(self._environ, directives_of(spec))
        try:
            answer = run_slurm(["sbatch", "--parsable", str(run.job_script)], environ)
        except SchedulerError as error:
            if is_answer_lost(str(error)):
                raise SubmissionUnclear(
                    f"Whether the job was submitted cannot be told: {error}. It may be queued: look with "
                    f"`squeue --me --name={shlex.quote(spec.name)}`. Where it is, leave it: the run "
                    f"goes on in {str(run.path)!r}. Where it is not, submit again with that --run-dir."
                ) from error
            raise SchedulerError(
                f"The job was not submitted: {error}. "
                "Nothing is queued; change what Slurm names and submit again."
            ) from error
        # With several clusters the answer is `job;cluster`.
        return answer.strip().splitlines()[-1].split(";")[0]

    def look(self, jobs: Sequence[Job]) -> list[JobView]:
        from hpctrain.jobs.slurm_status import look

        return look(jobs, self._outer)

    def cancel(self, jobs: Sequence[Job]) -> None:
        self._run(["scancel", *(job.job_id for job in jobs)])

    def requeue(self, jobs: Sequence[Job]) -> None:
        # The ranks save, the supervisor sees them leave and asks for the requeue. The steps are named, and
        # not the jobs: where other tasks of an array still wait, Slurm 22.05 refuses after it has sent the
        # signal, and scancel sends it again and again for a minute.
        left = {job.job_id for job in jobs}
        tried: dict[str, str] = {}
        deadline = time.monotonic() + _STEP_LIMIT_S
        while left and time.monotonic() < deadline:
            steps = {step.rpartition(".")[0]: step for step in steps_of(sorted(left), self._outer)}
            left -= {job for job, step in tried.items() if steps.get(job) != step}
            steps = {job: step for job, step in steps.items() if job in left}
            try:
                if steps:
                    self._run(["scancel", "--signal=TERM", *steps.values()])
                    left -= steps.keys()
            except SchedulerError as error:
                # Scancel signals twice, and the second time the step may be gone.
                if "Invalid job id" not in str(error):
                    raise
                tried = steps
            if left:
                time.sleep(0.2)
        if left:
            others = " The others are told." if len(left) < len(jobs) else ""
            raise SchedulerError(
                f"No rank of job {', '.join(sorted(left))} is running: they are being started, or have just "
                f"left. Try again in some seconds.{others}"
            )

    def lift_hold(self, jobs: Sequence[Job]) -> bool:
        from hpctrain.jobs.slurm_status import REQUEUE_PAUSE_S

        named = ",".join(job.job_id for job in jobs)
        try:
            self._run(["scontrol", "update", f"JobId={named}", f"StartTime=now+{REQUEUE_PAUSE_S}"])
        except SchedulerError:
            return False
        return True

    def _run(self, command: Sequence[str], *, timeout_s: float = COMMAND_LIMIT_S) -> str:
        return run_slurm(command, self._outer, timeout_s=timeout_s)
