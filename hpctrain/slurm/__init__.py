"""Slurm's text interface: commands, job states, environment, site discovery."""
