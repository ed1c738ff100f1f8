"""Data pipeline, from a data set to the batches of each rank: order, shares, loading, streams, randomness."""
