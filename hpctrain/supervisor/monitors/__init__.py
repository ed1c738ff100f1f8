"""Monitors that watch the nodes and the sweep while an attempt trains."""
