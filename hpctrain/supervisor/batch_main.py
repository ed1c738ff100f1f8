"""Supervise the run of a job's script on the batch host."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain import system
from hpctrain.cluster.ports import raise_fd_limit
from hpctrain.errors import HpctrainError, RunFailed, SchedulerError, SpecError
from hpctrain.files import make_folder, read_regular
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import (
    BATCH_PID_VARIABLE,
    CANCEL_GRACE_KEY,
    PREDECESSOR_VARIABLE,
    REQUEUE_GRACE_KEY,
    STOP_GRACE_VARIABLE,
    RunDir,
)
from hpctrain.slurm.config import query_config
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.site_facts import query_grace_s
from hpctrain.supervisor.acquire_run import NotInJob, check_in_job, run_of_this_job
from hpctrain.supervisor.buffered_storage import BufferedLogHandler, BufferedStorage, describe_disk_error
from hpctrain.supervisor.job_control import LocalJobControl, SlurmJobControl
from hpctrain.supervisor.launch.job_step import Launcher
from hpctrain.supervisor.launch.step_launchers import LocalLauncher, SrunLauncher
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.supervisor.notifications import send_notifications
from hpctrain.supervisor.run_end import finish_run
from hpctrain.supervisor.supervise import Supervisor
from hpctrain.supervisor.watchdog import ORPHANED_SIGNAL
from hpctrain.supervisor.workers.attempt_monitor import CANCEL_GRACE_S, STOP_GRACE_S
from hpctrain.supervisor.workers.batch_launcher import BatchLauncher, spec_of_allocation
from hpctrain.supervisor.workers.node_steps import StagePlan

log = logging.getLogger(__name__)

#: Name of a link to the batch script of a successor (`RunDir.successor_script`).
_SUCCESSOR = re.compile(r"continues-job-(\d+(?:_\d+)?)", re.ASCII)
#: Connections of a rank to the supervisor's host: the store connections for the process group and for failure
#: reports, and the heartbeat connections of the rank and its standby worker.
_CONNECTIONS_PER_RANK = 4


def main(argv: list[str], environ: Mapping[str, str], *, deaths: int = 0) -> int:
    """Supervise the run in the folder `argv[0]`; in a job array, the task of this job.

    `argv[1]` names the job that this one continues, if any.
    """
    path = run_of_this_job(RunDir(Path(argv[0])), environ).path
    if PREDECESSOR_VARIABLE not in environ and (marker := _SUCCESSOR.fullmatch(" ".join(argv[1:]))):
        # sbatch has not exported the variable.
        environ = {**environ, PREDECESSOR_VARIABLE: marker[1]}
    storage = BufferedStorage(path)
    run = RunDir(path, storage)
    try:
        spec = load_spec(run.spec)
        run.check_records()
        check_in_job(run, spec, environ)
    except HpctrainError as error:
        # Write nothing: this process might not belong to the run.
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    with suppress(OSError):
        make_folder(run.logs)
    _receive_signals(run, environ)
    log_file = BufferedLogHandler(run.supervisor_log)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[log_file]
    )
    try:
        with send_notifications(run, environ):
            return _supervise(run, spec, environ, deaths)
    finally:
        storage.flush_pending()
        log_file.lines.flush()


def _receive_signals(run: RunDir, environ: Mapping[str, str]) -> None:
    """Replace a batch script in the lock by this process, because signals are for the supervisor."""
    batch_pid = environ.get(BATCH_PID_VARIABLE)
    with suppress(OSError):
        if batch_pid is not None and read_regular(run.lock).strip() == batch_pid.encode():
            # In place: the lock belongs to this file.
            with open(run.lock, "r+b") as file:
                file.write(f"{system.getpid()}\n".encode())
                file.truncate()


def _supervise(run: RunDir, spec: JobSpec, environ: Mapping[str, str], deaths: int) -> int:
    try:
        if spec.array is not None:
            return LocalArray(run, spec, environ).run()
        raise_fd_limit(_CONNECTIONS_PER_RANK * spec.world_size)
        grace = stop_grace_env(spec, environ)
        plan = StagePlan.create(spec, environ)
        launch: Callable[[JobSpec, Mapping[str, str]], Launcher]
        launch = LocalLauncher if spec.backend == "local" else SrunLauncher
        if spec.program == "batch":
            launch, spec = BatchLauncher, spec_of_allocation(spec, environ)
        staging = None if plan is None else (plan, launch(plan.host_spec, environ))
        launcher = launch(plan.ranks_spec, {**environ, **plan.variables}) if plan else launch(spec, environ)
        if spec.backend == "local":
            job = LocalJobControl(spec, environ)
            return Supervisor(run, spec, launcher, job, grace, staging=staging).run()
        slurm_job = SlurmJobControl(run, spec, environ)
        try:
            # Slurm 22.05 does not set the variable. A restarted supervisor continues the job later.
            started = environ.get("SLURM_JOB_START_TIME", "") if not deaths else ""
            job_started_at = float(started) if started.isdecimal() else None
            supervisor = Supervisor(run, spec, launcher, slurm_job, grace, job_started_at, staging)
            system.handle_signal(ORPHANED_SIGNAL, supervisor.on_watchdog_death)
            code = supervisor.run(deaths)
            _ignore_watchdog_death()
            return code
        finally:
            slurm_job.successors.lease.release()
    except NotInJob as error:
        # Other jobs record the outcome of the run.
        log.error("%s", error)
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        cause = str(error) if isinstance(error, HpctrainError) else None
        if cause is None and isinstance(error, OSError):
            cause = describe_disk_error(error, run.path)
        if cause is None:
            log.exception("the supervisor failed")
            cause = f"the supervisor failed: {type(error).__name__}: {error} (see {run.supervisor_log})"
        else:
            log.error("%s", cause)
        return _fail(run, spec, environ, cause)


def _fail(run: RunDir, spec: JobSpec, environ: Mapping[str, str], cause: str) -> int:
    print(f"Error: {cause}", file=sys.stderr)
    job_id = LocalJobControl(spec, environ).job_id if spec.backend == "local" else own_job_id(environ)
    try:
        record = read_run_record(run)
    except OSError as error:
        log.error("cannot read the run's record, so the failure is not recorded: %s", error)
        return RunFailed.exit_code
    if record.job_id in (None, job_id) or record.finished is not None:
        _ignore_watchdog_death()
        finish_run(run, "FAILED", cause)
    return RunFailed.exit_code


def _ignore_watchdog_death() -> None:
    """Ignore the death of the batch script: the run has ended, or another job continues it."""
    system.handle_signal(ORPHANED_SIGNAL, lambda _number, _frame: None)


def stop_grace_env(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the grace times of the ranks, unless the user sets it."""
    if STOP_GRACE_VARIABLE in spec.env:
        return {}
    limits: dict[str, float | None] = {"SIGTERM": CANCEL_GRACE_S, "SIGUSR2": spec.stop_before_limit_s}
    if spec.backend == "local":
        limits[REQUEUE_GRACE_KEY] = STOP_GRACE_S
    else:
        limits["SIGTERM"] = None
        try:
            partition, qos = environ.get("SLURM_JOB_PARTITION", ""), environ.get("SLURM_JOB_QOS", "")
            outer = strip_job_env(environ)
            config = query_config(outer)
            limits[CANCEL_GRACE_KEY] = config.kill_wait_s
            limits["SIGTERM"] = query_grace_s(partition, qos, config, outer)
        except (SchedulerError, SpecError) as error:
            log.warning("cannot determine the grace time, so Slurm may kill ranks while they save: %s", error)
    return {STOP_GRACE_VARIABLE: ",".join(f"{name}={s:g}" for name, s in limits.items() if s is not None)}
