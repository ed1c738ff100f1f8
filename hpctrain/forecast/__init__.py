"""Predictions of runs: simulated restarts, ranges of a new run, and the effect of changes."""
