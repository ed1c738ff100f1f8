"""Removal of `fully_shard` from a module, for which torch has no function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

#: Prefixes of the attributes that `fully_shard` and its decorator add to a module.
_LEFT_BEHIND = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def fits_unsharded(module: nn.Module, device: torch.device) -> bool:
    """True if this rank's device has memory for all sharded parameters as a whole."""
    if device.type != "cuda":
        return True
    missing = sum(p.numel() * p.element_size() for p in module.parameters() if isinstance(p, DTensor))
    free, _ = torch.cuda.mem_get_info(device)
    return missing < 0.9 * free


def unshard_module(module: nn.Module) -> None:
    """Gather all parameters and remove every trace of sharding. All ranks must call this.

    Other hooks, attributes and submodules stay; the parameters are new objects.
    """
    for part in module.modules():
        _module_state_mapping.pop(part, None)
        for hooks in _hooks(part):
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[key]
        for name in [name for name in vars(part) if name.startswith(_LEFT_BEHIND)]:
            delattr(part, name)
        if isinstance(part, FSDPModule):
            # torch replaces the class by a new one, derived from FSDPModule and the module's own class.
            part.__class__ = type(part).__mro__[2]
    wholes: dict[torch.Tensor, nn.Parameter] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in wholes:
                    full = parameter.full_tensor().detach()
                    wholes[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                parameters[name] = wholes[parameter]


def _hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield value


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp")
