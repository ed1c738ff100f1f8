"""Reports on one page: the data of a run, and its presentation."""
