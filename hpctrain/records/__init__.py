"""Records of a run: events, logs, the supervisor's lease, the claim of the successor job."""
