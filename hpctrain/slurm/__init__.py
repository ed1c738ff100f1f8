"""Everything that depends on Slurm's text interface: commands, job states, environment, site discovery."""
