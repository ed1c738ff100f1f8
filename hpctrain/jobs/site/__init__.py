"""A Slurm site: read from Slurm, saved in a profile, compared with jobs."""
