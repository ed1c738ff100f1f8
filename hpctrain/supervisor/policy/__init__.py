"""Pure decision functions: restart, requeue, shrink or stop; ownership of the run."""
