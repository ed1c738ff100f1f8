"""The job under the supervisor: time left, nodes, requeue; on Slurm or on this machine."""
