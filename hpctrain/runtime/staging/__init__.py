"""Copies of data and of the Python environment on a node's local disk."""
