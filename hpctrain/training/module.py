"""What a user writes: a model that knows how to take one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hpctrain.errors import UserError


class Scheduler(Protocol):
    """A learning-rate schedule, as in `torch.optim.lr_scheduler`; stepped after every optimizer step."""

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Module(nn.Module):
    """An `nn.Module` with a training step. Method names are those of Lightning's LightningModule."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the loss, as the mean over the samples of `batch`: a scalar tensor.

        A mapping may carry further scalars beside `"loss"`, also means over the batch; each is averaged
        over the global batch and logged. The names must be the same on every rank and in every step.

        Args:
            batch: this rank's share of the global batch, collated, on this rank's device.
            batch_idx: number of the global batch in its epoch, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step(self, batch, batch_idx).")

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, Any]:
        """Return means over the samples of `batch`: a scalar, logged as `val_loss`, or a mapping of scalars.

        Every sample of the validation set is seen once, by one rank; means are weighted by sample counts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no validation_step(self, batch, batch_idx).")

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a pair (optimizer, scheduler), or {"optimizer": …, "lr_scheduler": …}."""
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers(self).")


@dataclass(frozen=True)
class Optimization:
    """What `configure_optimizers` returned, in one form."""

    optimizer: torch.optim.Optimizer
    scheduler: Scheduler | None


def configured(module: Module) -> Optimization:
    """Ask `module` for its optimizer and scheduler.

    Raises:
        UserError: it returned something else.
    """
    answer = module.configure_optimizers()
    parts: tuple[Any, ...] = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
    if isinstance(answer, Mapping) and set(answer) <= {"optimizer", "lr_scheduler"}:
        parts = (answer.get("optimizer"), answer.get("lr_scheduler"))
    if len(parts) in (1, 2) and isinstance(parts[0], torch.optim.Optimizer):
        scheduler = parts[1] if len(parts) == 2 else None
        if scheduler is None or hasattr(scheduler, "step"):
            return Optimization(parts[0], scheduler)
    raise UserError(
        f"{type(module).__name__}.configure_optimizers() returned {answer!r}. "
        "Return an optimizer, (optimizer, scheduler) or {'optimizer': …, 'lr_scheduler': …}."
    )


def as_scalars(output: torch.Tensor | Mapping[str, Any], only: str, origin: str) -> dict[str, torch.Tensor]:
    """A step's output as a mapping of scalar tensors; a lone tensor gets the name `only`.

    Raises:
        UserError: a value has more than one element.
    """
    mapping: Mapping[str, Any] = output if isinstance(output, Mapping) else {only: output}
    scalars = {}
    for name, value in mapping.items():
        tensor = torch.as_tensor(value)
        if tensor.numel() != 1:
            raise UserError(
                f"{origin} returned {name!r} with shape {tuple(tensor.shape)}. "
                "Return its mean over the batch, a scalar."
            )
        scalars[name] = tensor.reshape(())
    return scalars
