"""Writing, committing, reading and removing checkpoints, with a limit on every wait for a disk."""
