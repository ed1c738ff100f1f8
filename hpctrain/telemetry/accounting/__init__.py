"""Time accounting of a run, and its goodput."""
