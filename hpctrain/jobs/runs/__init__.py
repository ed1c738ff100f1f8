"""Submitted runs: status, logs, cancel, requeue and deliberate faults."""
