"""`python -m hpctrain.supervisor RUN`: what a job's script runs on the batch host."""

import os
import sys

from hpctrain.supervisor.local import end_session
from hpctrain.supervisor.main import main

exit_code = main(sys.argv[1:], os.environ)
end_session(os.environ)
sys.exit(exit_code)
