"""Sweeps: search space, record and early stopping. A trial of a sweep is a task of a job array."""
