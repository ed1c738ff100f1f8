"""Send requests about jobs to Slurm: test, submit, cancel, signal, requeue, change.

Every function that changes something raises `SchedulerError` if Slurm rejects a request or does not respond.
"""

from __future__ import annotations

import logging
import re
import signal
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import (
    CHAOS_STEP,
    NO_JOB_ID_MESSAGE,
    SlurmCall,
    is_answer_lost,
    is_transient,
    list_rank_steps,
    list_steps,
    run_slurm,
)
from hpctrain.slurm.parsing import parse_timestamp
from hpctrain.text import is_count

log = logging.getLogger(__name__)

#: Seconds to look for a step to signal: steps start and end in between.
_STEP_LIMIT_S = 3.0
#: Seconds for a signal. If an array task is requeued in the meantime, scancel 22.05 repeats it for a minute.
_SIGNAL_LIMIT_S = 10.0
#: Time limit for killed tasks to exit; usually shorter if the nodes are up.
_STEPS_END_S = 30.0
#: Time limit for Slurm to list the steps. Without the controller, srun cannot start a step either.
_STEPS_LISTED_S = 300.0
#: Time limit for Slurm to accept changes of a requeued job.
_UPDATE_LIMIT_S = 15.0
_POLL_INTERVAL_S = 0.5
#: Slurm ends a requeued job and all its processes immediately: SIGKILL follows some seconds later.
_UNTIL_KILLED = ("/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh")


def submit_job(options: Sequence[str], environ: Mapping[str, str]) -> str:
    """Submit a job with these arguments of `sbatch`, and return its id."""
    output = run_slurm(["sbatch", "--parsable", *options], environ)
    # In a multi-cluster setup the answer is `job;cluster`.
    job_id = output.strip().rpartition("\n")[2].partition(";")[0]
    if not is_count(job_id):
        raise SchedulerError(f"sbatch {NO_JOB_ID_MESSAGE}, but {output.strip()[-200:]!r}")
    return job_id


def cancel_jobs(job_ids: Sequence[str], environ: Mapping[str, str]) -> None:
    run_slurm(["scancel", *job_ids], environ)


def requeue_job(job_id: str, environ: Mapping[str, str]) -> None:
    """Requeue a running job; its processes, perhaps including this one, are ended."""
    run_slurm([*_UNTIL_KILLED, "scontrol", "requeue", job_id], environ)


def update_job(
    job_ids: Sequence[str], environ: Mapping[str, str], *, until_killed: bool = False, **fields: str
) -> None:
    command = ["scontrol", "update", f"JobId={','.join(job_ids)}"]
    command += [f"{name}={value}" for name, value in fields.items()]
    run_slurm([*(_UNTIL_KILLED if until_killed else ()), *command], environ)


def update_requeued_job(job_id: str, environ: Mapping[str, str], fields: Mapping[str, str]) -> None:
    """Change a job that Slurm may still be ending; a refused field does not prevent the others."""
    deadline = system.monotonic() + _UPDATE_LIMIT_S
    while True:
        refusals = {}
        for name, value in fields.items():
            try:
                update_job([job_id], environ, until_killed=True, **{name: value})
            except SchedulerError as error:
                refusals[name] = str(error)
        if not refusals:
            return
        if system.monotonic() > deadline:
            raise SchedulerError("; ".join(refusals.values()))
        fields = {name: fields[name] for name in refusals}
        system.sleep(_POLL_INTERVAL_S)


def shrink_job(job_id: str, hosts: Sequence[str], environ: Mapping[str, str]) -> None:
    # Imported here, because only supervisors use it.
    from hpctrain.cluster import compress_hostlist

    # scontrol writes a shell script with the new size into its working directory.
    with tempfile.TemporaryDirectory() as folder:
        update = ["scontrol", "update", f"JobId={job_id}", f"NodeList={compress_hostlist(list(hosts))}"]
        run_slurm(["env", f"--chdir={folder}", *update], environ)


def run_on_host(job_id: str, host: str | None, program: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a program on a node of the job, by default the first, in a step that overlaps the ranks."""
    # The raw job id differs from the id of an array task.
    cells = run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%A %B"], environ).split()
    if len(cells) != 2:
        raise SchedulerError(f"squeue does not show the host of job {job_id}.")
    raw_id, batch_host = cells
    step = [f"--jobid={raw_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host or batch_host}"]
    step += ["--mpi=none", f"--job-name={CHAOS_STEP}", "--gres=none", "--input=none", "--quiet"]
    run_slurm(["srun", *step, *program], environ)


def signal_steps(steps: Sequence[str], number: signal.Signals, environ: Mapping[str, str]) -> None:
    command = ["scancel", f"--signal={number.name.removeprefix('SIG')}", *steps]
    run_slurm(command, environ, timeout_s=_SIGNAL_LIMIT_S)


def signal_batch(job_ids: Sequence[str], number: signal.Signals, environ: Mapping[str, str]) -> None:
    """Send a signal to the batch scripts of running jobs only."""
    command = ["scancel", "--batch", f"--signal={number.name.removeprefix('SIG')}", *job_ids]
    run_slurm(command, environ, timeout_s=_SIGNAL_LIMIT_S)


def signal_ranks(job_ids: Sequence[str], number: signal.Signals, environ: Mapping[str, str]) -> None:
    """Send a signal to the ranks of running jobs."""
    # To steps: while other tasks of an array are pending, Slurm 22.05 reports an error for a signal to a job
    # after sending it, and scancel repeats the signal for a minute.
    remaining = set(job_ids)
    tried: dict[str, str] = {}
    unconfirmed: SchedulerError | None = None
    deadline = system.monotonic() + _STEP_LIMIT_S
    while remaining and system.monotonic() < deadline:
        steps = {step.rpartition(".")[0]: step for step in list_rank_steps(sorted(remaining), environ)}
        remaining -= {job for job, step in tried.items() if steps.get(job) != step}
        steps = {job: step for job, step in steps.items() if job in remaining}
        try:
            if steps and unconfirmed is None:
                signal_steps(list(steps.values()), number, environ)
                remaining -= steps.keys()
        except SchedulerError as error:
            if is_answer_lost(str(error)):
                # The signal may have arrived: wait for the steps to end instead of sending it again.
                unconfirmed, deadline = error, system.monotonic() + _STEP_LIMIT_S
            # scancel signals twice; the step may have ended before the second signal.
            elif "Invalid job id" not in str(error):
                raise
            tried = steps
        if remaining:
            system.sleep(0.2)
    if remaining and unconfirmed is not None:
        raise unconfirmed
    if remaining:
        addition = " The other jobs received the signal." if len(remaining) < len(job_ids) else ""
        raise SchedulerError(
            f"No rank of job {', '.join(sorted(remaining))} is running. The ranks may be starting, or may "
            f"have just exited. Try again in a few seconds.{addition}"
        )


def kill_steps(job_id: str, environ: Mapping[str, str], limit_s: float = _STEPS_LISTED_S) -> None:
    """Kill the steps of this job, and wait until they have ended, for a bounded time."""
    deadline, is_warned = system.monotonic() + limit_s, False
    while system.monotonic() < deadline:
        try:
            if not (steps := list_steps(job_id, environ)):
                return
            deadline = min(deadline, system.monotonic() + _STEPS_END_S)
            signal_steps(steps, signal.SIGKILL, environ)
        except SchedulerError as error:
            # A step may end before the signal.
            if not is_warned and "Invalid job id" not in str(error):
                is_warned = True
                log.warning("cannot end the job steps yet (%s); will retry", error)
        system.sleep(_POLL_INTERVAL_S)
    log.warning("could not end all job steps within the time limit, so some ranks may still be running")


#: Time limit in seconds: Slurm simulates the queue to predict a start. A long queue yields no forecast.
_TIMEOUT_S = 10.0
#: A start within this many seconds counts as immediate.
_IMMEDIATE_S = 60
#: Seconds: Slurm predicts later starts if running jobs have no time limit.
_MAX_START_S = 365 * 86400.0
_NOW = "now"

# Slurm 26.05 prints "a" after the time.
_START = re.compile(r"to start at (\S+)(?: a)? using \d+ processors on nodes (\S+)(?: in partition (\S+))?")
#: Messages of `sbatch --test-only` for jobs that sbatch accepts but that must wait.
_WAITS = (
    *("are busy", "Required node not available", "not available now", "dependency problem", "in held state"),
    *("reservation is in use", "not usable now", "maintenance reservation", "usage threshold"),
)


class JobTest:
    """A test of a batch script, which runs until its result is needed."""

    def __init__(self, script: str, environ: Mapping[str, str]) -> None:
        self._call = SlurmCall(["sbatch", "--test-only"], environ, text=script, timeout_s=_TIMEOUT_S)

    @cached_property
    def answer(self) -> tuple[str, str]:
        """The output and the error of sbatch."""
        try:
            return "".join(self._call.answer()), ""
        except SchedulerError as error:
            return "", str(error)

    @property
    def refusal(self) -> str:
        """The reason of a rejection; empty if there is none, or no answer."""
        _, error = self.answer
        is_refused = error.startswith("sbatch failed: ") and not is_transient(error)
        return error if is_refused and not any(message in error for message in _WAITS) else ""


def describe_start(directives: Mapping[str, str], output: str, error: str = "") -> str:
    """Describe the expected start of a job with these options, from the answer of its test."""
    if error:
        return f"No estimated start: {error}."
    if (match := _START.search(output)) is None:
        return f"No estimated start: {' '.join(output.split()) or 'sbatch printed nothing'}."
    time, nodes, partition = match.groups()
    start = parse_timestamp(time)
    if start is not None and start - datetime.now().timestamp() > _MAX_START_S:
        return "No estimated start: according to Slurm, the job waits for jobs without a time limit."
    if "hold" in directives:
        return "The job is held (--hold) and will start only after `scontrol release`."
    # The forecast ignores dependencies (seen with Slurm 22.05).
    start_text = _when(time)
    if "dependency" in directives:
        condition = "its dependency is satisfied (--dependency)"
        start_text = f"when {condition}" if start_text == _NOW else f"{start_text}, after {condition}"
    return f"Estimated start: {start_text}, on {nodes}{f', partition {partition}' if partition else ''}."


def _when(time: str) -> str:
    if (seconds := parse_timestamp(time)) is None:
        return time
    start, today = datetime.fromtimestamp(seconds), datetime.now()
    if (start - today).total_seconds() < _IMMEDIATE_S:
        return _NOW
    return f"{start:%H:%M}" if start.date() == today.date() else f"{start:%Y-%m-%d %H:%M}"
