"""Decide as pure functions: restart, requeue, shrink or stop, and the ownership of the run."""
