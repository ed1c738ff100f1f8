"""Talk to Slurm: commands, job states, environment, site discovery."""
