"""Diagnose attempts: failure files, kinds of failure, the root cause."""
