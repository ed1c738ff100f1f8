"""Output of a training: progress, metrics, timings, environment."""
