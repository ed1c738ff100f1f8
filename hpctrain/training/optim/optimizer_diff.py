"""Differences between a script's optimizers and those in the loaded checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def ignored_hyperparameters(
    optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any] | None
) -> list[str]:
    """Return sentences on hyper-parameters that differ from the checkpoint, whose values apply.

    Args:
        optimizers: as the script made them; call this before their states are loaded.
        states: their states in the checkpoint; None if it has none.
    """
    found: dict[str, None] = {}
    for number, (optimizer, state) in enumerate(zip(optimizers, states or (), strict=False)):
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        for new, old in zip(optimizer.param_groups, groups, strict=False):
            for name, saved, asked in _differences(new, old):
                which = f" of optimizer {number}" if len(optimizers) > 1 else ""
                found[
                    f"{name}{which} stays {saved!r}, the value in the checkpoint, although the script now "
                    f"sets {asked!r}. To change it in a resumed run, set it after the checkpoint is loaded, "
                    "in a callback's on_fit_start."
                ] = None
    return list(found)


def check_optimizer_class(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Check that a state belongs to this class of optimizer; another version of torch may lack a field.

    Raises:
        ValueError: it belongs to another class.
    """
    theirs = {name for group in state.get("param_groups", ()) for name in group}
    ours = {name for group in optimizer.param_groups for name in group}
    if (more := theirs - ours) and (less := ours - theirs):
        raise ValueError(
            f"its optimizer has {', '.join(sorted(more))}, the script's has {', '.join(sorted(less))}."
        )


def _differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    # A scheduler changes the rate at every step, and keeps the configured one as `initial_lr`.
    scheduled = "initial_lr" in new and "initial_lr" in old
    for name in new:
        if name == "params" or name not in old or (scheduled and name == "lr"):
            continue
        saved, asked = _plain(old[name]), _plain(new[name])
        if saved != asked:
            yield "lr" if name == "initial_lr" else name, saved, asked


def _plain(value: Any) -> Any:
    """Convert tensors and sequences to lists or tuples that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
