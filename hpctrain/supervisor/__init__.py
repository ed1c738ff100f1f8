"""What runs on the batch host: one process that launches the workers and decides what follows."""
