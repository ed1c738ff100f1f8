"""Authenticated rendezvous of ranks and torchrun agents."""
