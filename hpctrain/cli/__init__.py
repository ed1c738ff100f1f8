"""The command line. Only these modules use click."""

import gc

# Frequent garbage collection during imports takes longer than most commands. It stays enabled for commands
# that run for hours.
gc.set_threshold(100_000)
