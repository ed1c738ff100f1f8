"""A real Slurm cluster on this machine, from the installed packages, for experiments and tests."""

from __future__ import annotations

from hpctrain.sandbox.cluster import Sandbox, down, find, up
from hpctrain.sandbox.layout import list_names
from hpctrain.sandbox.requirements import installed_version

__all__ = ["Sandbox", "down", "find", "installed_version", "list_names", "up"]
