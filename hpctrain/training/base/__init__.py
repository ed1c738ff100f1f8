"""Common parts of training: precision, devices, generators, registries."""
