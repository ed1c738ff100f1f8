"""Start the workers on the batch host, and act on the end of each attempt."""
