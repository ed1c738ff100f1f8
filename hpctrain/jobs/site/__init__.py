"""What a Slurm site is like: read from Slurm, kept in a profile, held against jobs."""
