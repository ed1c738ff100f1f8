"""Components of a rank below the training: the worker, signals, the process group."""
