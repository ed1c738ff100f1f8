"""Detect the environment of a process: node lists, launchers, ranks. Imports no torch.

Each name is imported on first use: `hpctrain submit` needs few of them and starts faster.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.cluster.detection import detect
    from hpctrain.cluster.env_variables import ENVIRONMENT_VARIABLE
    from hpctrain.cluster.hostlist import compress_hostlist, expand_hostlist
    from hpctrain.cluster.ranks import Ranks

__all__ = ["ENVIRONMENT_VARIABLE", "Ranks", "compress_hostlist", "detect", "expand_hostlist"]

_HOMES = {
    "ENVIRONMENT_VARIABLE": "env_variables",
    "Ranks": "ranks",
    "compress_hostlist": "hostlist",
    "detect": "detection",
    "expand_hostlist": "hostlist",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
