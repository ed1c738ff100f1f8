"""Run the supervisor of a job's script on the batch host (`python -m hpctrain.supervisor RUN`)."""

import os
import sys

from hpctrain import system
from hpctrain.records.buffered_writer import make_stdio_lossy
from hpctrain.supervisor.watchdog import run_under_watchdog

make_stdio_lossy()
deaths = run_under_watchdog(os.environ)

from hpctrain.slurm.prepare_job_end import prepare_job_end  # noqa: E402
from hpctrain.supervisor.batch_main import main  # noqa: E402
from hpctrain.supervisor.launch.step_launchers import kill_session  # noqa: E402 (the waiting parent process does not need this)

exit_code = main(sys.argv[1:], os.environ, deaths=deaths)
kill_session(os.environ)
if "SLURM_JOB_ID" in os.environ:
    prepare_job_end(os.environ, exit_code)
    if exit_code:
        # Python's cleanup delays the next start.
        sys.stdout.flush()
        system.exit_now(exit_code)
sys.exit(exit_code)
