"""Optimizers, and changes to the gradient computation of a module."""
