"""A real Slurm cluster on this machine, from the installed packages, for experiments and tests."""

from __future__ import annotations

from hpctrain.sandbox.layout import list_names
from hpctrain.sandbox.slurm_sandbox import Sandbox, down, find, installed_version, up

__all__ = ["Sandbox", "down", "find", "installed_version", "list_names", "up"]
