"""Metrics, events and hardware measurements of a run."""
