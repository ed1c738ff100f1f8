"""The DDP loop as a script."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import any_program.ddp  # noqa: F401
