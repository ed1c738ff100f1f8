"""Saving, finding and verifying checkpoints. `manifest`, `checkpoint_dir` and `interval` import no torch."""
