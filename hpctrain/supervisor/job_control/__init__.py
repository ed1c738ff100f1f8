"""The job of the supervisor: remaining time, nodes, requeue; under Slurm or on this machine."""
