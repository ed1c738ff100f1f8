"""Hooks of Lightning's classes that hpctrain calls, and those that it refuses."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.module import Module

_PACKAGES = ("lightning", "pytorch_lightning")

_KINDS = "validation", "test"
_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
#: Methods that are not hooks.
_CONVERSIONS = ("load_from_checkpoint", "to_onnx", "to_torchscript", "to_tensorrt")
#: Methods that a user's LightningModule may override.
_SUPPORTED = {
    *("prepare_data", "setup", "teardown", "configure_model", "configure_optimizers", "lr_scheduler_step"),
    *_LOADERS,
    *_CONVERSIONS,
    *("training_step", "validation_step", "test_step", "predict_step"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_after_backward"),
    *("on_before_optimizer_step", "on_after_batch_transfer", "on_save_checkpoint", "on_load_checkpoint"),
    *(
        f"on_{kind}{part}_{end}"
        for kind in _KINDS
        for part in ("", "_epoch", "_batch")
        for end in ("start", "end")
    ),
    *("state_dict", "load_state_dict"),
}
#: Hooks of Lightning 1 that version 2 does not have.
_REMOVED = {
    *("training_epoch_end", "validation_epoch_end", "test_epoch_end", "on_epoch_start", "on_epoch_end"),
    *("training_end", "validation_end", "test_end", "on_batch_start", "on_batch_end", "tbptt_split_batch"),
    *("configure_ddp", "init_ddp_connection", "configure_sync_batchnorm", "configure_apex", "amp_scale_loss"),
    *("get_progress_bar_dict", "on_hpc_save", "on_hpc_load", "on_post_move_to_device"),
    *("on_pre_performance_check", "on_post_performance_check", "on_sanity_check_start"),
    *("on_train_dataloader", "on_val_dataloader", "on_test_dataloader", "on_predict_dataloader"),
}
#: Hooks of Lightning 2 that hpctrain does not call.
_UNSUPPORTED = {
    *("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"),
    *("configure_callbacks", "configure_sharded_model", "on_before_backward", "on_before_zero_grad"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_exception"),
    *(f"on_{kind}_model_{call}" for kind in (*_KINDS, "predict") for call in ("eval", "train", "zero_grad")),
    *(f"on_predict_{part}{end}" for part in ("", "epoch_", "batch_") for end in ("start", "end")),
}
_REPLACEMENTS = {
    "backward": "manual optimization",
    "configure_callbacks": "the Trainer setting callbacks",
    "configure_gradient_clipping": "the Trainer setting gradient_clip_norm or gradient_clip_value",
    "configure_ddp": "the Trainer settings find_unused_parameters, static_graph and bucket_cap_mb",
    "configure_sharded_model": "configure_model",
    "init_ddp_connection": "`hpctrain submit`, torchrun or srun, whose variables hpctrain detects",
    "on_before_batch_transfer": "on_after_batch_transfer",
    "on_before_zero_grad": "on_train_batch_end",
    "optimizer_zero_grad": "no method: hpctrain sets gradients to None after each update",
    "optimizer_step": "the Trainer setting warmup_steps, a scheduler, or manual optimization",
    "test_epoch_end": "on_test_epoch_end",
    "training_epoch_end": "on_train_epoch_end",
    "transfer_batch_to_device": "on_after_batch_transfer or collate_fn",
    "validation_epoch_end": "on_validation_epoch_end",
}
#: Parameters of steps that hpctrain does not pass.
_PARAMETERS = ("dataloader_iter", "optimizer_idx", "hiddens")


def lightning_base(thing: Any, *names: str) -> type | None:
    """Return the class of Lightning that `thing` extends; None if there is none. Does not import Lightning.

    Args:
        thing: any object.
        *names: names of the class; by default, LightningModule.
    """
    for kind in type(thing).__mro__:
        if kind.__name__ in (names or ("LightningModule",)) and kind.__module__.split(".")[0] in _PACKAGES:
            return kind
    return None


def overrides(thing: Any, method: str) -> bool:
    """Return true if the user's class overrides a method of Lightning's classes or of `Module`."""
    base = lightning_base(thing, "LightningModule", "LightningDataModule") or Module
    return getattr(type(thing), method, None) is not getattr(base, method, None)


def check_hooks(thing: Any, stage: str) -> None:
    """Check that hpctrain calls all of Lightning's hooks that a module or LightningDataModule overrides.

    Args:
        thing: a module of hpctrain or Lightning, or a DataModule.
        stage: "fit", "validate", "test" or "predict".

    Raises:
        UserError: it overrides another hook, or a step has another parameter.
    """
    name, base = type(thing).__name__, lightning_base(thing, "LightningModule", "LightningDataModule")
    known = _REMOVED | _UNSUPPORTED
    if base is None:
        known = (known | _SUPPORTED) - {*dir(Module), *_LOADERS, *_CONVERSIONS}
    else:
        known |= {each for each in dir(base) if each[0] != "_" and inspect.isfunction(getattr(base, each))}
        known -= {*dir(nn.Module), *_SUPPORTED}
    if stage != "predict":
        known = {each for each in known if not each.startswith("on_predict_")}
    if refused := sorted(each for each in known if overrides(thing, each)):
        hooks = "these hooks" if len(refused) > 1 else "this hook"
        remedies = [
            f"Instead of {each}, use {_REPLACEMENTS[each]}." for each in refused if each in _REPLACEMENTS
        ]
        other = "hpctrain.lightning.Trainer" if base else "a callback or a LightningModule"
        raise UserError(
            f"{name} overrides {', '.join(refused)}, which hpctrain.Trainer does not call. "
            f"{' '.join(remedies) or f'Rename or remove {hooks}, or use {other}.'}"
        )
    if base is None:
        return
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        parameters = inspect.signature(getattr(thing, step, check_hooks)).parameters
        if refused := [each for each in _PARAMETERS if each in parameters]:
            raise UserError(
                f"{name}.{step} has the parameter {refused[0]}, which hpctrain does not pass. Remove the "
                "parameter."
            )
