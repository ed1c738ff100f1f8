"""What runs in a rank below training: the worker, signals, the process group."""
