"""Jobs on a Slurm cluster, through sbatch, squeue, sacct, scancel and scontrol."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import ClassVar

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends import SubmissionUnclear
from hpctrain.jobs.directives import directives_of
from hpctrain.jobs.environment import outer_environment, sbatch_environment
from hpctrain.jobs.slurm_command import COMMAND_LIMIT_S, NO_ANSWER, job_state, run_slurm
from hpctrain.jobs.spec import BackendName, JobSpec
from hpctrain.jobs.states import JobView, RunState, from_slurm
from hpctrain.rundir import RunDir

#: A controller that is busy or restarting answers late; a probe is not worth that wait.
_PROBE_TIMEOUT_S = 5

# Columns of `squeue -O`: fixed width, since no separator is safe from values. 22.05 cuts to the width.
_COLUMNS = {"JobID": 24, "State": 24, "RestartCnt": 12, "Reason": 60, "EligibleTime": 24}
#: A requeued job that starts within the second in which it was stopped fails with "Job credential revoked".
_REQUEUE_PAUSE_S = 2

#: What is said where a request may have arrived and only the answer is missing.
_ANSWER_LOST = (NO_ANSWER, "Socket timed out", "Zero Bytes were transmitted or received")

_GPUS = re.compile(r"\bgpu(?::[^,:()]+)?:(\d+)")


class SlurmBackend:
    """Jobs on a Slurm cluster."""

    name: ClassVar[BackendName] = "slurm"

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._outer = outer_environment(environ)

    def trouble(self) -> str | None:
        """Why Slurm cannot be used here, in a few words; None where it answers."""
        if shutil.which("sbatch", path=self._environ.get("PATH")) is None:
            return "there is no sbatch on the PATH"
        try:
            self._run(["sinfo", "--noheader", "--format=%R"], timeout_s=_PROBE_TIMEOUT_S)
        except SchedulerError as error:
            return str(error)
        return None

    def check(self, spec: JobSpec) -> list[str]:
        command = ["sinfo", "--noheader", "--format=%D|%G"]
        # Without a partition the site may choose one by the job's needs, so all of them count.
        where = "the cluster"
        if partition := spec.directives.get("partition"):
            command.append(f"--partition={partition}")
            where = f"partition {partition}"
        groups = [line.split("|", 1) for line in self._run(command).splitlines() if "|" in line]
        gpus_of = [(int(nodes), sum(map(int, _GPUS.findall(gres)))) for nodes, gres in groups]
        most = max((gpus for _, gpus in gpus_of), default=0)
        if gpus_of and spec.gpus_per_node > most:
            raise SpecError(
                f"{spec.gpus_per_node} GPUs a node are asked for (--gpus-per-node), but no node of {where} "
                f"has more than {most} (sinfo). Ask for fewer, or for another --partition."
            )
        gpus = f" with {spec.gpus_per_node} GPUs each" if spec.gpus_per_node else ""
        fitting = sum(nodes for nodes, gpus in gpus_of if gpus >= spec.gpus_per_node)
        if gpus_of and spec.nodes > fitting:
            raise SpecError(
                f"{spec.nodes} nodes{gpus} are asked for (--nodes), but {where} has {fitting} (sinfo). "
                "Ask for fewer, or for another --partition."
            )
        return []

    def submit(self, spec: JobSpec, run: RunDir, lock: int) -> str:  # noqa: ARG002 (the queue is the lock)
        environ = sbatch_environment(self._environ, directives_of(spec))
        try:
            answer = run_slurm(["sbatch", "--parsable", str(run.job_script)], environ)
        except SchedulerError as error:
            if any(words in str(error) for words in _ANSWER_LOST):
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

    def look(self, jobs: Sequence[tuple[str, RunDir]]) -> list[JobView]:
        try:
            queued = self._queue([job_id for job_id, _ in jobs])
        except SchedulerError as error:
            return [JobView(RunState.UNKNOWN, str(error)) for _ in jobs]
        return [queued.get(job_id) or self._past(job_id) for job_id, _ in jobs]

    def cancel(self, job_id: str, run: RunDir) -> None:  # noqa: ARG002
        self._run(["scancel", job_id])

    def requeue(self, job_id: str, run: RunDir) -> None:  # noqa: ARG002
        # Without --batch or --full the signal reaches the steps only: the ranks save, the
        # supervisor sees them leave and asks for the requeue.
        self._run(["scancel", "--signal=TERM", job_id])

    def lift_hold(self, job_id: str) -> bool:
        try:
            self._run(["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{_REQUEUE_PAUSE_S}"])
        except SchedulerError:
            return False
        return True

    def _queue(self, job_ids: Sequence[str]) -> dict[str, JobView]:
        """The jobs that are still in the queue.

        Raises:
            SchedulerError: the controller does not answer.
        """
        layout = ",".join(f"{name}:{width}" for name, width in _COLUMNS.items())
        command = ["squeue", "--noheader", f"--jobs={','.join(job_ids)}", f"--Format={layout}"]
        try:
            answer = self._run(command)
        except SchedulerError as error:
            if "Invalid job id" in str(error):
                return {}
            raise
        views = {}
        for line in answer.splitlines():
            cells, start = [], 0
            for width in _COLUMNS.values():
                cells.append(line[start : start + width].strip())
                start += width
            job_id, words, restarts, reason, eligible_at = cells
            state = from_slurm(words)
            # Since 22.05 a requeued job waits two minutes with the reason BeginTime.
            requeued = state is RunState.PENDING and reason == "BeginTime" and restarts not in ("", "0")
            held = requeued and not _is_about_to_start(eligible_at)
            more = [word for word in (words, reason) if word not in ("", "None", state)]
            views[job_id] = JobView(state, ", ".join(more), held)
        return views

    def _past(self, job_id: str) -> JobView:
        """A job that the queue does not list: what accounting knows, else what the controller remembers."""
        try:
            answer = self._run(
                ["sacct", "-X", "--noheader", "--parsable2", "--format=State", f"--jobs={job_id}"]
            )
            words = answer.strip().splitlines()[-1:]
        except SchedulerError:
            words = []
        if not words:
            try:
                found = job_state(job_id, self._outer)
            except SchedulerError as error:
                if "Invalid job id" not in str(error):
                    return JobView(RunState.UNKNOWN, str(error))
                found = None
            words = [found] if found else []
        if not words:
            return JobView(RunState.FAILED, f"Slurm no longer knows job {job_id}")
        return JobView(from_slurm(words[0]), f"Slurm says {words[0]}")

    def _run(self, command: Sequence[str], *, timeout_s: float = COMMAND_LIMIT_S) -> str:
        return run_slurm(command, self._outer, timeout_s=timeout_s)


def _is_about_to_start(eligible_at: str) -> bool:
    """Whether a job's begin time is so near that its hold must have been lifted already."""
    try:
        begin = datetime.fromisoformat(eligible_at)
    except ValueError:
        return False
    return (begin - datetime.now()).total_seconds() <= 2 * _REQUEUE_PAUSE_S
