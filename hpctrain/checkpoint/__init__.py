"""Saving, finding and verifying checkpoints. `manifest`, `retention` and `interval` import no torch."""
