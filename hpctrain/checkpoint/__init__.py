"""Saves, finds and verifies checkpoints. `manifest`, `place`, `retention` and `interval` import no torch."""
