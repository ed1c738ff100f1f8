"""Pure decisions: restart, requeue, shrink or stop; who owns the run."""
