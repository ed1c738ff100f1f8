"""Rendezvous of ranks and torchrun agents that prove the secret of their job."""
