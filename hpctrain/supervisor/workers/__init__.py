"""Run the ranks of an attempt: heartbeats, hangs, stragglers, standby workers."""
