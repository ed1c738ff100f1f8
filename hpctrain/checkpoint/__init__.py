"""Saves, finds and verifies checkpoints. `manifest` and `interval` import no torch; `store` does."""
