"""Measurements of a node and its GPUs."""
