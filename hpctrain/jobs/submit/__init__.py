"""Submission of a run: checks, batch script, code snapshot, run folder, scheduler."""
