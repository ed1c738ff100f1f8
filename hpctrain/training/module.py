"""Define the base class of a model with a training step."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hpctrain.errors import UserError


class Hyperparameters(dict[str, Any]):
    """Hyper-parameters, by name; also accessible as attributes."""

    __getattr__ = dict.__getitem__


class Module(nn.Module):
    """An `nn.Module` with a training step. Method names are those of Lightning's LightningModule.

    Attributes:
        device: device of the parameters.
        trainer: the training or evaluation that uses the module, with Lightning's attribute names.
        hparams: the arguments that `save_hyperparameters` has recorded.
    """

    trainer: Any
    hparams: Hyperparameters

    def __getattr__(self, name: str) -> Any:
        if name == "device":
            return next((t.device for t in (*self.parameters(), *self.buffers())), torch.device("cpu"))
        if name == "trainer":
            run = find_run(self)
            if run is None:
                raise AttributeError(
                    f"{type(self).__name__}.trainer exists only during fit, validate, test and predict."
                )
            return run.proxy
        return super().__getattr__(name)

    def log(self, name: str, value: Any, prog_bar: bool = False, **options: Any) -> None:  # noqa: ARG002
        """Log a mean over the samples of the batch. For use in the steps and their `_end` methods.

        The value, a number or a tensor with one element, appears in the progress line, and is averaged over
        all ranks. `options` are further arguments of Lightning's method.

        Raises:
            UserError: no step is running, or an argument is not supported.
        """
        run = find_run(self)
        if run is None:
            raise UserError(
                f"{type(self).__name__}.log({name!r}, …) was called outside of fit, validate and test."
            )
        run.log(self, name, value, options)

    def log_dict(self, dictionary: Mapping[str, Any], prog_bar: bool = False, **options: Any) -> None:
        """Log several means; see `log`."""
        for name, value in dictionary.items():
            self.log(name, value, prog_bar, **options)

    def save_hyperparameters(self, *names: str, ignore: str | Iterable[str] = ()) -> None:
        """Record the arguments of the calling `__init__` in `hparams`: `names`, or all except `ignore`."""
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        arguments = inspect.getargvalues(frame.f_back)
        values = {name: arguments.locals[name] for name in arguments.args[1:]}
        values |= arguments.locals[arguments.keywords] if arguments.keywords else {}
        omitted = {ignore} if isinstance(ignore, str) else {*ignore}
        chosen = {name: values[name] for name in names or values if name not in omitted}
        self.hparams = Hyperparameters({**vars(self).get("hparams", {}), **chosen})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Return the loss, as the mean over the samples of `batch`: a scalar tensor.

        A mapping may contain other scalars in addition to `"loss"`, as means over the batch. Each scalar is
        averaged over the global batch and logged. The names must be the same on every rank and in every step.
        With `"num_tokens"`, the loss is treated as the mean over this number of tokens, independent of the
        samples.

        With a third parameter, `optimizer_idx`, this method is called once per optimizer and returns the loss
        for that optimizer. Parameters of other optimizers receive no gradient during the call. If the result
        is None, that optimizer skips the step.

        Args:
            batch: this rank's share of the global batch, collated, on this rank's device.
            batch_idx: number of the global batch in its epoch, from 0.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define training_step(self, batch, batch_idx)."
        )

    def training_step_end(self, outputs: Any) -> torch.Tensor | Mapping[str, torch.Tensor]:
        """Convert the result of `training_step` to the loss, or to a mapping with it; unchanged by default.

        With the strategies `dp` and `ddp2`, `outputs` are the outputs of all devices, or of all ranks of the
        node, as one batch: tensors joined along their first dimension, which counts samples.
        """
        loss: torch.Tensor | Mapping[str, torch.Tensor] = outputs
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, Any]:
        """Return means over the samples of `batch`: a scalar, logged as `val_loss`, or a mapping of scalars.

        Each sample of the validation set is processed once, by one rank; means are weighted by sample counts.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define validation_step(self, batch, batch_idx)."
        )

    def validation_step_end(self, outputs: Any) -> Any:
        """Convert the result of the step to means, as `training_step_end` does in training."""
        return outputs

    test_step_end = validation_step_end

    def test_step(self, batch: Any, batch_idx: int) -> torch.Tensor | Mapping[str, Any]:
        """Return means for `Trainer.test`, as in `validation_step`; a scalar is logged as `test_loss`."""
        raise NotImplementedError(f"{type(self).__name__} does not define test_step(self, batch, batch_idx).")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        """Return the output for `Trainer.predict`; that of `forward` by default."""
        return self(batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, a pair (optimizer, scheduler), or {"optimizer": …, "lr_scheduler": …}.

        Several optimizers, in a list or tuple, must have disjoint parameters. All optimizers step, each after
        a separate pass if `training_step` accepts `optimizer_idx`. With schedules, return ([optimizers],
        [schedulers]). A scheduler advances with every optimizer step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define configure_optimizers(self).")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add values that the module's `state_dict` lacks to the empty dict `checkpoint`.

        Supported values are tensors, numbers, strings, None, and lists, tuples and dicts of these, which must
        be the same on all ranks.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the values that `on_save_checkpoint` put into `checkpoint`, if there are any."""


def find_run(module: nn.Module) -> Any:
    return vars(module).get("_hpctrain")


def has_step_end(module: nn.Module, step: str) -> bool:
    kind, name = getattr(module, "_user_class", type(module)), f"{step}_end"
    return getattr(kind, name, None) not in (None, getattr(Module, name, None))


def collect_logged(module: nn.Module, num_samples: int) -> AbstractContextManager[dict[str, Any]]:
    """Collect the values that the module logs within the block, for this number of samples."""
    run = find_run(module)
    return nullcontext({}) if run is None else run.logging(num_samples)


def as_scalars(output: torch.Tensor | Mapping[str, Any], only: str, origin: str) -> dict[str, torch.Tensor]:
    """Return the output of a step as a mapping of scalar tensors; a single tensor has the name `only`."""
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
                f"{origin}: {name!r} is {value!r}, but must be a number or a tensor with one element."
            ) from None
        if tensor.numel() != 1:
            raise UserError(
                f"{origin}: {name!r} has shape {tuple(tensor.shape)}, but must be a scalar: the mean "
                "over the batch."
            )
        scalars[name] = tensor.reshape(())
    return scalars


def check_initialized(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name} belongs to a lazy layer, such as nn.LazyLinear, so it has no size before the first "
                "call of this layer. Before training, call the module once with a batch, or use a layer with "
                "a fixed size."
            )


def takes_optimizer_idx(module: Module) -> bool:
    """Return true if the module's training step accepts `optimizer_idx`, for one optimizer at a time."""
    if is_manual(module) and not hasattr(module, "manual_backward"):
        raise UserError(
            f"{type(module).__name__}.automatic_optimization is False, but hpctrain.Module does not support "
            "manual optimization. To use several optimizers, add a third parameter, optimizer_idx, to "
            "training_step, and return the loss for the optimizer with that index."
        )
    return "optimizer_idx" in inspect.signature(type(module).training_step).parameters


def is_manual(module: Any) -> bool:
    """Return true if the training step updates the parameters itself, as that of a LightningModule may."""
    return getattr(module, "automatic_optimization", True) is False


def check_frozen(frozen: Iterable[tuple[str, nn.Parameter]], effect: str) -> None:
    for name, parameter in frozen:
        if parameter.requires_grad:
            raise UserError(
                f"The parameter {name} was frozen when training began, so {effect}. Set requires_grad=True "
                "before training begins. To train the parameter only later, set its learning rate to 0 until "
                "then."
            )
