"""The version of hpctrain."""

__version__ = "0.1.0"
