"""Single-page reports: the data of a run, and the presentation."""
