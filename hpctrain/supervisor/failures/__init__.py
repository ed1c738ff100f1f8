"""Causes of an attempt's end: failure files, kinds of failure, the root cause."""
