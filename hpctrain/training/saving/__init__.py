"""Saving, resuming and stopping of a training run."""
