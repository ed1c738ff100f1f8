"""What a user writes: a model that knows how to take one training step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError


class Module(nn.Module):
    """An `nn.Module` with a training step. Method names are those of Lightning's LightningModule."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the loss, as the mean over the samples of `batch`: a scalar tensor.

        A mapping may carry further scalars beside `"loss"`, also means over the batch; each is averaged
        over the global batch and logged. The names must be the same on every rank and in every step. With
        `"num_tokens"` among them, the loss is taken for the mean over so many tokens, whatever the samples.

        With a third parameter, `optimizer_idx`, it is called once for each optimizer, and returns the loss
        that it lowers; parameters of the others take no gradient meanwhile. None: it sits this step out.

        Args:
            batch: this rank's share of the global batch, collated, on this rank's device.
            batch_idx: number of the global batch in its epoch, from 0.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step(self, batch, batch_idx).")

    def training_step_end(self, outputs: Any) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the loss, or a mapping with it, from what `training_step` returned; that itself by default.

        With the strategy `ddp2`, `outputs` are those of all ranks of the node as one batch: tensors joined
        along their first dimension, which counts samples. With any other they are this rank's.
        """
        loss: torch.Tensor | Mapping[str, torch.Tensor] = outputs
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, Any]:
        """Return means over the samples of `batch`: a scalar, logged as `val_loss`, or a mapping of scalars.

        Every sample of the validation set is seen once, by one rank; means are weighted by sample counts.
        """
        raise NotImplementedError(f"{type(self).__name__} has no validation_step(self, batch, batch_idx).")

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, Any]:
        """As `validation_step`, for `Trainer.test`; a lone scalar is logged as `test_loss`."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step(self, batch, batch_idx).")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        """Return what `Trainer.predict` collects; the module's output by default."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a pair (optimizer, scheduler), or {"optimizer": …, "lr_scheduler": …}.

        Several optimizers, in a list or tuple, share out the parameters among them, and all step, each after
        a pass of its own if `training_step` takes `optimizer_idx`; with schedulers: ([optimizers],
        [schedulers]). A scheduler advances with every optimizer step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers(self).")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put into `checkpoint`, which is empty, what shall be kept besides the module's `state_dict`.

        Tensors, numbers, text, None, and lists, tuples and dicts of them. Every rank calls this at the step
        that is saved; the values have to be the same on all ranks.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take back what `on_save_checkpoint` put into `checkpoint`.

        Every rank calls this after the state of module and optimizers is loaded, unless nothing was put in.
        """


def as_scalars(output: torch.Tensor | Mapping[str, Any], only: str, origin: str) -> dict[str, torch.Tensor]:
    """A step's output as a mapping of scalar tensors; a lone tensor gets the name `only`.

    Raises:
        UserError: a value is no number, or has more than one element.
    """
    if isinstance(output, torch.Tensor) and output.ndim == 0:
        return {only: output}
    mapping: Mapping[str, Any] = output if isinstance(output, Mapping) else {only: output}
    scalars = {}
    for name, value in mapping.items():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            scalars[name] = value
            continue
        try:
            tensor = torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError):
            raise UserError(
                f"{origin} returned {value!r} as {name!r}. Return a number, or a tensor with one element."
            ) from None
        if tensor.numel() != 1:
            raise UserError(
                f"{origin} returned {name!r} with shape {tuple(tensor.shape)}. "
                "Return its mean over the batch, a scalar."
            )
        scalars[name] = tensor.reshape(())
    return scalars


def takes_optimizer_idx(module: Module) -> bool:
    """Whether the module's training step is about one optimizer at a time.

    Raises:
        UserError: it is to optimize by itself.
    """
    if getattr(module, "automatic_optimization", True) is False:
        raise UserError(
            f"{type(module).__name__}.automatic_optimization is False. Here each optimizer has a pass of its "
            "own: give training_step a third parameter, optimizer_idx, and return the loss that it lowers."
        )
    return "optimizer_idx" in inspect.signature(type(module).training_step).parameters
