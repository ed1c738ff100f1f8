"""Names of settings in other trainers: accepted aliases, and explanations for other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.errors import UserError
from hpctrain.text import suggest

#: Former names, and names in Lightning, Hugging Face and torch with the same meaning and values.
ALIASES = {
    "best_metric": "monitor",
    "best_mode": "mode",
    "bucket_mb": "bucket_cap_mb",
    "comm_algorithm": "algorithm",
    "data_timeout_s": "dataloader_timeout_s",
    "dataloader_num_workers": "num_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "default_root_dir": "run_dir",
    "eval_steps": "validate_every",
    "every_n_train_steps": "checkpoint_every",
    "gradient_clip_val": "gradient_clip_norm",
    "keep_checkpoints": "keep_last",
    "log_every_n_steps": "log_every",
    "logger": "loggers",
    "logging_steps": "log_every",
    "lr_batch_size": "lr_reference_batch_size",
    "max_grad_norm": "gradient_clip_norm",
    "metric_for_best_model": "monitor",
    "num_sanity_val_steps": "sanity_val_batches",
    "num_train_epochs": "max_epochs",
    "output_dir": "run_dir",
    "report_to": "loggers",
    "sanity_batches": "sanity_val_batches",
    "save_steps": "checkpoint_every",
    "save_top_k": "keep_best",
    "save_total_limit": "keep_last",
    "torch_compile": "compile",
}

_SUBMIT = "is set when the run is submitted, with `hpctrain submit --nodes N --gpus-per-node G`"
_BATCH = (
    "is not a setting. Set global_batch_size, the number of samples per optimizer step across all ranks "
    "(batch size per rank × ranks × accumulation steps). To limit the samples per forward pass, set "
    "micro_batch_size"
)
_RANKS = "is set by the launcher. Without a launcher, set devices"
_DATA = "is not a Trainer setting. Pass the data sets to fit()"
#: Values of Lightning's settings that change nothing.
_NO_EFFECT = {"accelerator": ("auto",), "callbacks": (None,), "logger": (True, False, None)}
#: Callbacks of Lightning, and what replaces them.
_CALLBACKS = {
    "EarlyStopping": "hpctrain.EarlyStopping",
    "GradientAccumulationScheduler": "global_batch_size, which remains constant",
    "LearningRateMonitor": "the metrics of training_step, to which you can add the learning rate",
    "ModelCheckpoint": "the Trainer settings checkpoint_every, keep_last, keep_best and monitor",
    "RichProgressBar": "the built-in progress line, which appears in terminals",
    "TQDMProgressBar": "the built-in progress line, which appears in terminals",
    "Timer": "`hpctrain submit --time`",
}
_RESUME = (
    "is not needed. A run resumes from its newest checkpoint. "
    "To start from another checkpoint, use `hpctrain checkpoints import`"
)
_CPU = (
    "is not a setting. hpctrain uses the visible GPUs. To train on CPUs, set CUDA_VISIBLE_DEVICES to an "
    "empty string"
)
_DEVICE_KINDS = "is not supported. hpctrain trains only on GPUs and CPUs"
_MICRO = "is not a setting. Use micro_batch_size='auto'"
_PROGRESS = "is not a setting. hpctrain shows its progress line only in terminals"
_RELOAD = "is not supported. hpctrain uses the data that was passed to fit() in every epoch"
_METHODS = "is not a setting. Call fit(), validate(), test() or predict()"
_OPTIMIZER = "is not a Trainer setting. Choose the optimizer and its options in configure_optimizers"
_SCHEDULER = "is not a Trainer setting. Choose the scheduler and its options in configure_optimizers"
_LOADER = (
    "is not a setting. hpctrain starts the data workers itself. To tune them, set num_workers and "
    "prefetch_factor"
)
_BACKEND = "is chosen automatically: NCCL on GPUs, Gloo on CPUs"
_RECOMPUTE = (
    "is not a setting. Use recompute with the names of submodules, for example recompute=['blocks.*']"
)
_VALIDATE = "is called validate_every in hpctrain. Set it to a number of steps or to 'epoch'"
_PRECISION = "is not a setting. Use precision='16-mixed' or precision='bf16-mixed'"

#: Names with a different meaning or type, and their replacements.
EXPLAINED = {
    "accelerator": _CPU,
    "accumulate_grad_batches": _BATCH,
    "adafactor": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "amp_backend": _PRECISION,
    "amp_level": _PRECISION,
    "auto_find_batch_size": _MICRO,
    "auto_lr_find": "is not supported. Set the learning rate in configure_optimizers",
    "auto_scale_batch_size": _MICRO,
    "auto_select_gpus": "is not a setting. Use devices='auto'",
    "automatic_optimization": "is not a Trainer setting. Set it in the __init__ of a LightningModule",
    "barebones": "is not a setting. To reduce the overhead, remove loggers and callbacks",
    "batch_size": _BATCH,
    "benchmark": "is not a setting. Set torch.backends.cudnn.benchmark instead",
    "bf16": _PRECISION,
    "bf16_full_eval": _PRECISION,
    "check_val_every_n_epoch": _VALIDATE,
    "checkpoint_callback": "is not a setting. To save only at the end, set checkpoint_every=None",
    "ckpt_path": _RESUME,
    "data_collator": "is called collate_fn in hpctrain",
    "data_seed": "is not a separate setting. seed also determines the order of the data",
    "dataloader_drop_last": "is not a Trainer setting. Pass a DataLoader with drop_last=True to fit()",
    "dataloader_persistent_workers": _LOADER,
    "dataloader_pin_memory": "is not needed. hpctrain pins memory if it trains on a GPU",
    "datamodule": "is not a Trainer setting. Pass it to fit()",
    "ddp_backend": _BACKEND,
    "ddp_timeout": "is set when the run is submitted, with `hpctrain submit --hang-timeout`",
    "deepspeed": "is not supported. Use strategy='fsdp'",
    "detect_anomaly": "is not a setting. Call torch.autograd.set_detect_anomaly(True)",
    "deterministic": "is not a setting. Call torch.use_deterministic_algorithms(True)",
    "disable_tqdm": _PROGRESS,
    "distributed_backend": "is called strategy in hpctrain. For example, set strategy='ddp'",
    "do_eval": _METHODS,
    "do_predict": _METHODS,
    "do_train": _METHODS,
    "early_stop_callback": "is not a setting. Use callbacks=[hpctrain.EarlyStopping(…)]",
    "enable_autolog_hparams": "is not needed. hpctrain records the settings in the run folder",
    "enable_checkpointing": "is not a setting. To save only at the end, set checkpoint_every=None",
    "enable_model_summary": "is not supported. Use print(module)",
    "enable_progress_bar": _PROGRESS,
    "eval_accumulation_steps": "is not needed. Metrics are averaged during validation",
    "eval_dataset": _DATA,
    "eval_delay": "is not supported. For longer intervals, set validate_every to a number of steps",
    "eval_on_start": "is not a setting. To validate some batches before training, set sanity_val_batches",
    "eval_strategy": _VALIDATE,
    "evaluation_strategy": _VALIDATE,
    "fast_dev_run": "is not a setting. Use max_steps=1",
    "flush_logs_every_n_steps": "is not needed. Metrics are written at each logged step",
    "fp16": _PRECISION,
    "fp16_full_eval": _PRECISION,
    "fp16_opt_level": _PRECISION,
    "fsdp": "is not a setting. Use strategy='fsdp'",
    "fsdp_config": "is not a setting. Use strategy='fsdp'",
    "full_determinism": "is not a setting. Call torch.use_deterministic_algorithms(True)",
    "gpus": f"{_SUBMIT}. Without a launcher, set devices",
    "gradient_accumulation_steps": _BATCH,
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": _RECOMPUTE,
    "gradient_clip_algorithm": "is not a setting. Set either gradient_clip_norm or gradient_clip_value",
    "greater_is_better": "is not a setting. Use mode='max' or mode='min'",
    "group_by_length": "is not a setting. Pass a DataLoader with an hpctrain.LengthGroupedBatchSampler",
    "hpus": _DEVICE_KINDS,
    "ignore_data_skip": "is not a setting. A resumed run continues at the exact sample",
    "inference_mode": "is not a setting. Gradients are always disabled during validation",
    "ipus": _DEVICE_KINDS,
    "label_smoothing_factor": "is not a Trainer setting. Apply it to the loss in training_step",
    "learning_rate": _OPTIMIZER,
    "limit_predict_batches": "is not a setting. Pass a torch.utils.data.Subset to predict()",
    "limit_test_batches": "is not a setting. Pass a torch.utils.data.Subset to test()",
    "limit_train_batches": "is not a setting. Pass a torch.utils.data.Subset to fit(), or use max_steps",
    "limit_val_batches": "is not a setting. Pass a torch.utils.data.Subset to fit() as val_dataset",
    "load_best_model_at_end": "is not a setting. Use `hpctrain checkpoints export --best`",
    "local_rank": _RANKS,
    "log_gpu_memory": "is not needed. hpctrain measures GPU use, and `hpctrain report` shows it",
    "log_level": "is not a setting. Use Python's logging module",
    "logging_dir": "is not a setting. hpctrain writes logs to the run folder (run_dir)",
    "logging_first_step": "is not a setting. Set log_every to a number of steps",
    "logging_strategy": "is not a setting. Set log_every to a number of steps",
    "lr": _OPTIMIZER,
    "lr_scheduler_kwargs": _SCHEDULER,
    "lr_scheduler_type": _SCHEDULER,
    "max_time": "is set when the run is submitted, with `hpctrain submit --time`",
    "min_epochs": "is not a setting. Training ends early only if a callback such as EarlyStopping ends it",
    "min_steps": "is not a setting. Training ends early only if a callback such as EarlyStopping ends it",
    "model": "is not a Trainer setting. Pass it to fit()",
    "model_registry": "is not supported. Write the weights to a file with `hpctrain checkpoints export`",
    "move_metrics_to_cpu": "is not needed. hpctrain stores metrics as numbers, not as tensors",
    "multiple_trainloader_mode": "is not supported. Pass a single training data set to fit()",
    "neftune_noise_alpha": "is not supported. Add the noise in training_step",
    "nnodes": _SUBMIT,
    "no_cuda": _CPU,
    "nproc_per_node": _SUBMIT,
    "num_nodes": _SUBMIT,
    "num_processes": _SUBMIT,
    "optim": _OPTIMIZER,
    "optim_args": _OPTIMIZER,
    "overfit_batches": "is not a setting. Pass a torch.utils.data.Subset to fit()",
    "overwrite_output_dir": "is not a setting. To start over, use a new run folder (run_dir)",
    "per_device_eval_batch_size": _BATCH,
    "per_device_train_batch_size": _BATCH,
    "plugins": "is not a setting. hpctrain detects the launcher automatically (see `hpctrain env`)",
    "prepare_data_per_node": "is not a Trainer setting. Set it in the LightningModule or LightningDataModule",
    "process_position": _PROGRESS,
    "profiler": "is not a setting. Use torch.profiler, or the time breakdown in `hpctrain report`",
    "progress_bar_refresh_rate": _PROGRESS,
    "push_to_hub": "is not supported. Write the weights to a file with `hpctrain checkpoints export`",
    "reload_dataloaders_every_epoch": _RELOAD,
    "reload_dataloaders_every_n_epochs": _RELOAD,
    "remove_unused_columns": "is not a setting. Choose the columns in the data set or in collate_fn",
    "replace_sampler_ddp": "is not a setting. hpctrain divides the data set among the ranks itself",
    "resume_from_checkpoint": _RESUME,
    "run_name": "is set when the run is submitted, with `hpctrain submit --name`",
    "save_on_each_node": "is not a setting. To save to a folder on each node first, set local_checkpoints",
    "save_only_model": "is not a setting. `hpctrain checkpoints export` writes only the weights to a file",
    "save_safetensors": "is not a setting. Use `hpctrain checkpoints export RUN FILE.safetensors`",
    "save_strategy": "is called checkpoint_every in hpctrain. Set it to a number of steps or to 'auto'",
    "stochastic_weight_avg": "is not supported. Use torch.optim.swa_utils in the module",
    "sync_batchnorm": "is not a setting. Call torch.nn.SyncBatchNorm.convert_sync_batchnorm on the module",
    "terminate_on_nan": "is not a setting. Use on_bad_loss='stop', which is the default",
    "tf32": "is not a setting. Call torch.set_float32_matmul_precision('high')",
    "torch_compile_backend": "is not a setting. Set an argument of torch.compile: compile={'backend': …}",
    "torch_compile_mode": "is not a setting. Set an argument of torch.compile: compile={'mode': …}",
    "tpu_cores": _DEVICE_KINDS,
    "track_grad_norm": "is not a setting. grad_norm is logged if gradient_clip_norm is set",
    "train_batch_size": _BATCH,
    "train_dataloader": _DATA,
    "train_dataloaders": _DATA,
    "train_dataset": _DATA,
    "truncated_bptt_steps": "is not supported. training_step must compute the complete loss",
    "use_amp": _PRECISION,
    "use_cpu": _CPU,
    "use_distributed_sampler": "is not a setting. hpctrain divides the data set among the ranks itself",
    "val_check_interval": _VALIDATE,
    "val_dataloaders": _DATA,
    "warmup_ratio": "is not a setting. Set warmup_steps to a number of steps",
    "weight_decay": _OPTIMIZER,
    "weights_save_path": "is not a setting. hpctrain saves checkpoints to the run folder (run_dir)",
    "weights_summary": "is not supported. Use print(module)",
}


#: Names of arguments in the methods of Lightning's Trainer.
_ARGUMENTS = {
    "dataloaders": "dataset",
    "model": "module",
    "train_dataloader": "train_dataset",
    "train_dataloaders": "train_dataset",
    "val_dataloaders": "val_dataset",
}


def canonical_arguments(
    method: str, given: dict[str, object], lightning: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of a method of the Trainer under hpctrain's names.

    Args:
        method: name of the method.
        given: arguments under hpctrain's names; None if not passed.
        lightning: further arguments under Lightning's names.

    Raises:
        UserError: an argument is unknown, not supported, or passed under two names.
    """
    result = dict(given)
    for name, value in lightning.items():
        argument = _ARGUMENTS.get(name, name)
        if name in ("weights_only", "verbose", "return_predictions"):
            continue  # without effect on the result
        if name == "ckpt_path":
            if value not in (None, "last") or (value and method != "fit"):
                remedy = (
                    _RESUME
                    if method == "fit"
                    else "is not supported. hpctrain uses the current weights of the module"
                )
                raise UserError(f"{method}(ckpt_path={value!r}): ckpt_path {remedy}.")
        elif argument not in result:
            raise UserError(f"{method}() has no argument {name!r}. {suggest(name, result)}")
        elif result[argument] is not None and value is not None:
            raise UserError(f"{method}() received both {argument} and {name}. Pass only one of them.")
        else:
            result[argument] = result[argument] if value is None else value
    return result


def replacement_of_callback(callback: object) -> str:
    """Return a sentence about the replacement of a callback of another trainer."""
    name = type(callback).__name__
    return f"Use {_CALLBACKS[name]}." if name in _CALLBACKS else "Subclass hpctrain.Callback."


def canonical_settings(given: dict[str, object], known: Iterable[str]) -> dict[str, object]:
    """Return the settings under hpctrain's names.

    Raises:
        UserError: a setting is unknown, or set under two names.
    """
    known = list(known)
    result: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for name, value in given.items():
        if any(type(value) is type(each) and value == each for each in _NO_EFFECT.get(name, ())):
            continue
        setting = name if name in known else ALIASES.get(name, name)
        if setting in spelled:
            raise UserError(
                f"{spelled[setting]}={result[setting]!r} and {name}={value!r} are the same setting. "
                "Set only one of them."
            )
        if setting not in known:
            if name in EXPLAINED:
                raise UserError(f"Trainer({name}={value!r}): {name} {EXPLAINED[name]}.")
            raise UserError(f"Trainer has no setting {name!r}. {suggest(name, known)}")
        result[setting], spelled[setting] = value, name
    return result
