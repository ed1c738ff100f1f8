"""`python -m hpctrain.supervisor RUN`: what a job's script runs on the batch host."""

import os
import sys

from hpctrain.supervisor.main import main

sys.exit(main(sys.argv[1:], os.environ))
