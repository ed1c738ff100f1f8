"""Use a cluster over SSH: open a connection, check the environment, and send code."""
