"""Output of a training run: progress, metrics, timings, environment."""
