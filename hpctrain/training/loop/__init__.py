"""Training loop: steps, exchange between ranks, validation."""
