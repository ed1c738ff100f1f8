"""Detectors, one module per launcher, each with a function `detect(environ) -> Ranks | None`."""
