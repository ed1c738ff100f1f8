"""A read-only look at a Slurm site and at this machine: what will hold a run up, and what to do about it."""
