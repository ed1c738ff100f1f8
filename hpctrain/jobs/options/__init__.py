"""Submission options: the table, the sources of values, and the specification built from them."""
