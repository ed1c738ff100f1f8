"""Launch job steps: the command of a rank, srun or local processes, containers, the rendezvous store."""
