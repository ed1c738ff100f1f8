"""From the folder of a run to its supervisor: what a job's script starts on the batch host."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster.connections import allow_connections
from hpctrain.errors import HpctrainError, RunFailed
from hpctrain.jobs.record import read_record
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.grace import grace_variables
from hpctrain.supervisor.guardian import ORPHANED
from hpctrain.supervisor.lasting import LastingRun, LogFile, words_of_disk
from hpctrain.supervisor.local import LocalLauncher
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.supervisor.local_job import LocalJob
from hpctrain.supervisor.notifications import notifying
from hpctrain.supervisor.slurm_job import SlurmJob, own_job_id
from hpctrain.supervisor.srun import SrunLauncher
from hpctrain.supervisor.submission import NoPart, check_place, own_run
from hpctrain.supervisor.supervise import Supervisor

log = logging.getLogger(__name__)

#: To the store: one for its process group, and one where it reports a failure; its line, and that of the
#: worker that waits for its place.
_CONNECTIONS_PER_RANK = 4


def main(argv: list[str], environ: Mapping[str, str], *, deaths: int = 0) -> int:
    """Supervise the run in the folder `argv[0]`; of a job array, the task that this job is.

    Args:
        argv: the folder of the run.
        environ: the variables of the job's script.
        deaths: how many supervisors of this job were killed before.
    """
    run = LastingRun(own_run(RunDir(Path(argv[0])), environ).path)
    try:
        spec = JobSpec.load(run.spec)
        check_place(run, spec, environ)
    except HpctrainError as error:
        # Before anything is written: nothing says so far that this process is the run's.
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    with suppress(OSError):
        run.logs.mkdir(parents=True, exist_ok=True)
    run.keep_room()
    log_file = LogFile(run.supervisor_log)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", handlers=[log_file]
    )
    try:
        with notifying(run, environ):
            return _supervise(run, spec, environ, deaths)
    finally:
        run.settle()
        log_file.lines.flush()


def _supervise(run: RunDir, spec: JobSpec, environ: Mapping[str, str], deaths: int) -> int:
    try:
        if spec.array is not None:
            return LocalArray(run, spec, environ).run()
        allow_connections(_CONNECTIONS_PER_RANK * spec.world_size)
        grace = grace_variables(spec, environ)
        if spec.backend == "local":
            return Supervisor(run, spec, LocalLauncher(spec, environ), LocalJob(spec), grace).run()
        job = SlurmJob(run, spec, environ)
        try:
            supervisor = Supervisor(run, spec, SrunLauncher(spec, environ), job, grace, environ)
            signal.signal(ORPHANED, supervisor.leave_orphaned)
            return supervisor.run(deaths)
        finally:
            job.lease.release()
    except NoPart as error:
        # What becomes of the run is for others to write down.
        log.error("%s", error)
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except HpctrainError as error:
        log.error("%s", error)
        return _fail(run, spec, environ, str(error))
    except Exception as error:
        if isinstance(error, OSError) and (words := words_of_disk(error, run.path)):
            log.error("%s", words)
            return _fail(run, spec, environ, words)
        log.exception("the supervisor itself failed")
        words = f"the supervisor failed: {type(error).__name__}: {error} (see {run.supervisor_log})"
        return _fail(run, spec, environ, words)


def _fail(run: RunDir, spec: JobSpec, environ: Mapping[str, str], cause: str) -> int:
    """Say why this job fails, and write it down, unless it is another one that the run is now."""
    print(f"Error: {cause}", file=sys.stderr)
    own_id = LocalJob(spec).job_id if spec.backend == "local" else own_job_id(environ)
    record = read_record(run)
    if record.job_id in (None, own_id) or record.finished is not None:
        attempt = max(run.attempts(), default=0)
        run.log_event("finished", attempt, state="FAILED", exit_code=RunFailed.exit_code, cause=cause)
    return RunFailed.exit_code
