"""In what a script's optimizers are others than those of the checkpoint that they go on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def ignored_settings(optimizers: Sequence[torch.optim.Optimizer], states: Sequence[Any] | None) -> list[str]:
    """Sentences about hyper-parameters that the script has otherwise than the checkpoint, whose values count.

    Args:
        optimizers: as the script has made them; call this before they are given their states.
        states: of each, from the checkpoint; None where it has none.
    """
    found: dict[str, None] = {}
    for number, (optimizer, state) in enumerate(zip(optimizers, states or (), strict=False)):
        groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()
        for new, old in zip(optimizer.param_groups, groups, strict=False):
            for name, saved, asked in _differences(new, old):
                which = f" of optimizer {number}" if len(optimizers) > 1 else ""
                found[
                    f"{name}{which} goes on as {saved!r}, which the checkpoint has, though the script now "
                    f"has {asked!r}. To change it in a run that goes on, set it after the load, in a "
                    "callback's on_fit_start."
                ] = None
    return list(found)


def check_kind(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """See that a state is of this kind of optimizer; one of another version of torch may lack something.

    Raises:
        ValueError: it is of another.
    """
    theirs = {name for group in state.get("param_groups", ()) for name in group}
    ours = {name for group in optimizer.param_groups for name in group}
    if (more := theirs - ours) and (less := ours - theirs):
        raise ValueError(
            f"it has an optimizer with {', '.join(sorted(more))}, and the script one with "
            f"{', '.join(sorted(less))}."
        )


def _differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    # A scheduler changes the rate from step to step, and keeps what it was set to.
    scheduled = "initial_lr" in new and "initial_lr" in old
    for name in new:
        if name == "params" or name not in old or (scheduled and name == "lr"):
            continue
        saved, asked = _plain(old[name]), _plain(new[name])
        if saved != asked:
            yield "lr" if name == "initial_lr" else name, saved, asked


def _plain(value: Any) -> Any:
    """Without tensors, and with one kind of sequence."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, (list, tuple)) else value
