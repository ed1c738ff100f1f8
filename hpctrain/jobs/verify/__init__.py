"""Verification of a run: train a part of it again, and compare the result with its record."""
