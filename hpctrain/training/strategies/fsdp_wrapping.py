"""Selection of the submodules whose sharded parameters are gathered together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_wrap_modules(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the elements of Sequential, ModuleList and ModuleDict.

    Of nested containers only the innermost count. A block that shares a parameter with the rest of the model
    is left out, and gathered with the rest.
    """
    everywhere = _occurrences(module)
    units: dict[nn.Module, None] = {}
    for block in _blocks(module):
        inside = _occurrences(block)
        if inside and all(everywhere[parameter] == count for parameter, count in inside.items()):
            units[block] = None
    return list(units)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _blocks(child)


def _occurrences(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the occurrences of each parameter, without 0-dimensional ones, which cannot be sharded."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named if parameter.ndim)
