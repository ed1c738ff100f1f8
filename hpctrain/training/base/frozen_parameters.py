"""Parameters that are frozen when training begins, so that their gradients are not summed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from hpctrain.errors import UserError


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]], effect: str) -> None:
    """Check that parameters are still frozen.

    Args:
        frozen: the parameters that were frozen when training began, with their names.
        effect: description of what training them would lead to.

    Raises:
        UserError: a parameter is not frozen.
    """
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise UserError(
                f"The parameter {name} was frozen when training began, so {effect}. Set requires_grad=True "
                "before training begins. To train the parameter only later, set its learning rate to 0 until "
                "then."
            )
