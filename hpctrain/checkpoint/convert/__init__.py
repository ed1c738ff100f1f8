"""Conversion of weights and checkpoints from and to the formats of other programs."""
