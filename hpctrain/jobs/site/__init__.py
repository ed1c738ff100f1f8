"""A Slurm site: read from Slurm, kept in a profile, compared with jobs."""
