"""The supervisor: a process on the batch host that starts the workers and acts on the end of each attempt."""
