"""Use of a cluster over SSH: connection, environment check, code, and logs that survive lost connections."""
