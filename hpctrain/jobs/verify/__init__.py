"""Verification of a run: train a part of it again, and compare with its record."""
