"""A real Slurm cluster on this machine, out of the installed packages: to try things, and for tests."""

from __future__ import annotations

from hpctrain.sandbox.cluster import Sandbox, find
from hpctrain.sandbox.plan import names
from hpctrain.sandbox.setup import up
from hpctrain.sandbox.teardown import down

__all__ = ["Sandbox", "down", "find", "names", "up"]
