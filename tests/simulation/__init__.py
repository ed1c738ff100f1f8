"""The real supervisor in virtual time, on a simulated Slurm, with simulated ranks and disks.

`simulate.py` runs seeds; a seed replays exactly. `docs/architecture.md` describes the supervisor.
"""
