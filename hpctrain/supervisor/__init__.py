"""The process on the batch host that starts the workers and decides what follows each attempt."""
