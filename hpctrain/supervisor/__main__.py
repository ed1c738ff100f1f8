"""`python -m hpctrain.supervisor RUN`: what a job's script runs on the batch host."""

import os
import sys

from hpctrain.output import make_lenient
from hpctrain.supervisor.guardian import become_supervisor

make_lenient()
deaths = become_supervisor(os.environ)

from hpctrain.supervisor.local import end_session  # noqa: E402 (the process that waits needs none of this)
from hpctrain.supervisor.main import main  # noqa: E402

exit_code = main(sys.argv[1:], os.environ, deaths=deaths)
end_session(os.environ)
sys.exit(exit_code)
