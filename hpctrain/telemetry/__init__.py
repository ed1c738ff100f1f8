"""What a run measures and what it runs on."""
