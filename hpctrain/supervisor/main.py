"""From the folder of a run to its supervisor: what a job's script starts on the batch host."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.cluster.connections import allow_connections
from hpctrain.errors import HpctrainError, RunFailed
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.grace import grace_variables
from hpctrain.supervisor.guardian import ORPHANED
from hpctrain.supervisor.local import LocalLauncher
from hpctrain.supervisor.local_array import LocalArray
from hpctrain.supervisor.notifications import notifying
from hpctrain.supervisor.scheduler import LocalJob, SlurmJob
from hpctrain.supervisor.srun import SrunLauncher
from hpctrain.supervisor.submission import StillGoing, own_run
from hpctrain.supervisor.supervise import Supervisor

log = logging.getLogger(__name__)

#: To the store: one for its process group, and one where it reports a failure.
_CONNECTIONS_PER_RANK = 2


def main(argv: list[str], environ: Mapping[str, str], *, deaths: int = 0) -> int:
    """Supervise the run in the folder `argv[0]`; of a job array, the task that this job is.

    Args:
        argv: the folder of the run.
        environ: the variables of the job's script.
        deaths: how many supervisors of this job were killed before.
    """
    run = own_run(RunDir(Path(argv[0])), environ)
    run.logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        filename=run.supervisor_log,
    )
    with notifying(run, environ):
        return _supervise(run, environ, deaths)


def _supervise(run: RunDir, environ: Mapping[str, str], deaths: int) -> int:
    try:
        spec = JobSpec.load(run.spec)
        if spec.array is not None:
            return LocalArray(run, spec, environ).run()
        allow_connections(_CONNECTIONS_PER_RANK * spec.world_size)
        if spec.backend == "slurm":
            launcher, scheduler = SrunLauncher(spec, environ), SlurmJob(run, spec, environ)
            supervisor = Supervisor(run, spec, launcher, scheduler, grace_variables(spec, environ), environ)
            signal.signal(ORPHANED, supervisor.leave_orphaned)
            return supervisor.run(deaths)
        grace = grace_variables(spec, environ)
        return Supervisor(run, spec, LocalLauncher(spec, environ), LocalJob(spec), grace).run()
    except StillGoing as error:
        # What becomes of the run is for that job to write down.
        log.error("%s", error)
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    except HpctrainError as error:
        log.error("%s", error)
        run.log_event(
            "finished", max(run.attempts(), default=0), state="FAILED", exit_code=4, cause=str(error)
        )
        return RunFailed.exit_code
    except Exception as error:
        log.exception("the supervisor itself failed")
        cause = f"the supervisor failed: {type(error).__name__}: {error} (see {run.supervisor_log})"
        run.log_event("finished", max(run.attempts(), default=0), state="FAILED", exit_code=4, cause=cause)
        return RunFailed.exit_code
