"""Which submodules are gathered as one, where parameters are cut over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_units(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model: what stands in a Sequential, ModuleList or ModuleDict, innermost of these.

    A block that shares a parameter with the rest of the model is none: it is gathered with the rest.
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
    """How often each parameter is found; those without dimensions, which cannot be cut, are left out."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named if parameter.ndim)
