"""Read-only diagnosis of a Slurm site and this machine: obstacles to runs, and remedies."""
