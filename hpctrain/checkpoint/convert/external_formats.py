"""Parse the training state in a single file of another program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hpctrain.errors import UserError
from hpctrain.text import join_or

#: Common names of each part in a dict.
_WEIGHTS = ("state_dict", "model", "module", "model_state_dict", "net", "weights")
_OPTIMIZERS = ("optimizer_states", "optimizers", "optimizer", "optimizer_state_dict", "optim")
_SCHEDULERS = (
    *("lr_schedulers", "schedulers", "scheduler", "lr_scheduler"),
    *("scheduler_state_dict", "lr_scheduler_state_dict"),
)
_STEPS = ("global_step", "step", "steps", "iteration", "iter", "num_steps")
#: Prefix that DistributedDataParallel adds to all names. Within a name, it may belong to the model.
_DDP_PREFIX = "module."
#: Segments that other wrappers add to the names of a wrapped module or submodule, by wrapper.
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "_checkpoint_wrapped_module.": "activation checkpointing",
    "_fsdp_wrapped_module.": "FullyShardedDataParallel",
    "_forward_module.": "Lightning Fabric",
}


@dataclass(frozen=True)
class ExternalState:
    origin: str
    weights: dict[str, Any]
    optimizers: list[Any] | None = None
    """A state_dict each; None if the file has none."""
    schedulers: list[Any] | None = None
    step: int | None = None
    omitted: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def weights_alone(self) -> ExternalState:
        names = [name for name in ("optimizers", "schedulers") if getattr(self, name)]
        return replace(self, optimizers=None, schedulers=None, omitted=(*self.omitted, *names))

    def tree(self) -> dict[str, Any]:
        """Return the state in the structure of the Trainer's checkpoints; missing parts are empty."""
        return {
            "module": self.weights,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
            "scaler": None,
            "user": {},
            "plan": None,
            "validated_step": 0,
            "validation": {},
            "latest": {},
        }


def parse_external_state(content: Any, origin: str) -> ExternalState:
    if not isinstance(content, Mapping):
        raise UserError(
            f"{origin} contains an object of type {type(content).__name__}, not a state_dict or a dict that "
            "contains one."
        )
    if _is_state_dict(content):
        weights, messages = _unwrapped(content)
        return ExternalState("a state_dict", weights, remarks=messages)
    name = next((name for name in _WEIGHTS if _is_state_dict(content.get(name))), None)
    if name is None:
        raise UserError(
            f"{origin} contains no state_dict (keys: {', '.join(map(repr, content)) or 'none'}). The file "
            f"must contain a state_dict, at the top level or under the key {join_or(map(repr, _WEIGHTS))}."
        )
    version = content.get("pytorch-lightning_version")
    weights, messages = _unwrapped(content[name])
    optimizers, schedulers = (_first(content, names) for names in (_OPTIMIZERS, _SCHEDULERS))
    used = {name, "pytorch-lightning_version", optimizers[0], schedulers[0], *_STEPS}
    step = next((content[key] for key in _STEPS if isinstance(content.get(key), int)), None)
    return ExternalState(
        f"Lightning {version}" if version else "PyTorch",
        weights,
        optimizers[1],
        schedulers[1],
        step=step,
        omitted=tuple(str(key) for key in content if key not in used),
        remarks=messages,
    )


def _is_state_dict(value: Any) -> bool:
    """True if `value` maps names to tensors; a few `_extra_state` entries of other types are allowed."""
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, torch.Tensor) for item in value.values())
        and all(
            isinstance(item, torch.Tensor) or str(name).endswith("_extra_state")
            for name, item in value.items()
        )
    )


def _first(content: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str | None, list[Any] | None]:
    for name in names:
        if states := content.get(name):
            return name, list(states) if isinstance(states, (list, tuple)) else [states]
    return None, None


def match_names(weights: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """Return `weights` with the `names` of a module, if they differ only in what wrappers add."""
    by_plain_name = {_without_wrappers(name): name for name in names}
    if weights.keys() == set(by_plain_name.values()):
        return weights
    renamed = {by_plain_name.get(_without_wrappers(name), name): value for name, value in weights.items()}
    return renamed if len(renamed) == len(weights) else weights


def _without_wrappers(name: str, segments: Iterable[str] = (_DDP_PREFIX, *_WRAPPERS)) -> str:
    name = f".{name}"
    for segment in segments:
        name = name.replace(f".{segment}", ".")
    return name.removeprefix(".")


def _unwrapped(weights: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    plain = {_without_wrappers(name, _WRAPPERS): value for name, value in weights.items()}
    messages = [
        f"removed {segment!r} (added by {wrapper}) from the names"
        for segment, wrapper in _WRAPPERS.items()
        if any(f".{segment}" in f".{name}" for name in weights)
    ]
    while plain and all(name.startswith(_DDP_PREFIX) for name in plain):
        plain = {name.removeprefix(_DDP_PREFIX): value for name, value in plain.items()}
        messages.append(
            f"removed the prefix {_DDP_PREFIX!r} (added by DistributedDataParallel) from all names"
        )
    return plain, tuple(messages)
