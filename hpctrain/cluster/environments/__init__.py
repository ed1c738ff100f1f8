"""One small module for each kind of environment; each offers `detect(environ) -> Ranks | None`."""
