"""The local tier: checkpoints in a fast folder of each node, copied to the run folder in the background."""
