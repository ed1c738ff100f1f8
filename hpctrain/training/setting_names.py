"""Names and values of settings in other trainers: those that work here, and a remedy for the others."""

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
    "data_collator": "collate_fn",
    "data_timeout_s": "dataloader_timeout_s",
    "dataloader_num_workers": "num_workers",
    "dataloader_prefetch_factor": "prefetch_factor",
    "ddp_bucket_cap_mb": "bucket_cap_mb",
    "ddp_find_unused_parameters": "find_unused_parameters",
    "default_root_dir": "run_dir",
    "distributed_backend": "strategy",
    "eval_steps": "validate_every",
    "every_n_train_steps": "checkpoint_every",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "gradient_clip_val": "gradient_clip_norm",
    "keep_checkpoints": "keep_last",
    "log_every_n_steps": "log_every",
    "logger": "loggers",
    "logging_steps": "log_every",
    "lr_batch_size": "lr_reference_batch_size",
    "max_grad_norm": "gradient_clip_norm",
    "metric_for_best_model": "monitor",
    "nnodes": "num_nodes",
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
#: Names of strategies in Lightning, and the settings with the same meaning.
_STRATEGIES: dict[str, dict[str, Any]] = {
    "bagua": {"strategy": "ddp"},
    "ddp_cpu": {"strategy": "ddp_spawn", "accelerator": "cpu"},
    "ddp_find_unused_parameters_false": {"strategy": "ddp", "find_unused_parameters": False},
    "ddp_find_unused_parameters_true": {"strategy": "ddp", "find_unused_parameters": True},
    "ddp_fork": {"strategy": "ddp_spawn"},
    "ddp_fully_sharded": {"strategy": "fsdp"},
    "ddp_notebook": {"strategy": "ddp_spawn"},
    "ddp_sharded_spawn": {"strategy": "ddp_sharded"},
    "fsdp_native": {"strategy": "fsdp"},
}
#: Values that request what hpctrain does anyway.
_NO_EFFECT: dict[str, tuple[object, ...]] = {
    "accelerator": (None, "auto"),
    "amp_backend": ("native",),
    "auto_lr_find": (False,),
    "auto_scale_batch_size": (False,),
    "automatic_optimization": (True,),
    "benchmark": (False,),
    "callbacks": (None,),
    "check_val_every_n_epoch": (1,),
    "checkpoint_callback": (True,),
    "dataloader_pin_memory": (True,),
    "deterministic": (False,),
    "detect_anomaly": (False,),
    "enable_checkpointing": (True,),
    "enable_progress_bar": (True,),
    "fast_dev_run": (False,),
    "gradient_clip_algorithm": ("norm",),
    "logger": (True, False, None),
    "limit_predict_batches": (1.0,),
    "limit_test_batches": (1.0,),
    "limit_train_batches": (1.0,),
    "limit_val_batches": (1.0,),
    "overfit_batches": (0, 0.0),
    "replace_sampler_ddp": (True,),
    "strategy": (None,),
    "sync_batchnorm": (False,),
    "use_amp": (False,),
    "use_distributed_sampler": (True,),
    "val_check_interval": (1.0,),
}
#: Remedies, and the settings of other trainers that they replace.
_REMEDIES = {
    "Set it in configure_optimizers": "adafactor adam_beta1 adam_beta2 adam_epsilon auto_lr_find "
    "learning_rate lr lr_scheduler_kwargs lr_scheduler_type optim optim_args weight_decay",
    "Set global_batch_size, the number of samples per optimizer step across all ranks, and micro_batch_size, "
    "the maximum number of samples per forward pass": "batch_size per_device_eval_batch_size "
    "per_device_train_batch_size train_batch_size",
    "Use micro_batch_size='auto'": "auto_find_batch_size auto_scale_batch_size",
    "Use accelerator='cpu'": "no_cuda use_cpu",
    "The launcher sets it. Without a launcher, set devices": "local_rank nproc_per_node",
    "Set it with `hpctrain submit`, by --time, --name or --hang-timeout": "ddp_timeout max_time run_name",
    "Pass the data to fit()": "datamodule eval_dataset train_dataloader train_dataloaders train_dataset "
    "val_dataloaders",
    "Pass the module to fit()": "model",
    "Call fit(), validate(), test() or predict()": "do_eval do_predict do_train",
    "Pass a torch.utils.data.Subset, or set max_steps": "fast_dev_run limit_predict_batches "
    "limit_test_batches limit_train_batches limit_val_batches overfit_batches",
    "Pass a DataLoader with this property to fit()": "dataloader_drop_last group_by_length "
    "remove_unused_columns",
    "hpctrain starts the data workers itself. Set num_workers and prefetch_factor": "dataloader_pin_memory "
    "dataloader_persistent_workers",
    "hpctrain divides the data among the ranks itself": "replace_sampler_ddp use_distributed_sampler",
    "hpctrain reads the same data in every epoch": "multiple_trainloader_mode "
    "reload_dataloaders_every_epoch reload_dataloaders_every_n_epochs",
    "The same seed determines weights and data": "data_seed",
    "Use precision='16-mixed' or precision='bf16-mixed'": "bf16 bf16_full_eval fp16 fp16_full_eval use_amp",
    "hpctrain does not support apex. Use precision='16-mixed'": "amp_backend amp_level fp16_opt_level",
    "hpctrain trains only on GPUs and CPUs": "hpus ipus tpu_cores",
    "Use strategy='fsdp'": "deepspeed fsdp fsdp_config",
    "hpctrain chooses NCCL on GPUs and Gloo on CPUs": "ddp_backend",
    "hpctrain detects the launcher itself (see `hpctrain env`)": "plugins",
    "Use recompute with the names of submodules, such as recompute=['blocks.*']": "gradient_checkpointing "
    "gradient_checkpointing_kwargs",
    "Pass a dict of torch.compile's arguments as compile": "torch_compile_backend torch_compile_mode",
    "Set either gradient_clip_norm or gradient_clip_value": "gradient_clip_algorithm",
    "Set validate_every to a number of steps or to 'epoch'": "check_val_every_n_epoch eval_delay "
    "eval_strategy evaluation_strategy val_check_interval",
    "Set sanity_val_batches": "eval_on_start",
    "Set checkpoint_every to a number of steps, 'auto' or None": "checkpoint_callback enable_checkpointing "
    "save_strategy",
    "Set log_every to a number of steps": "flush_logs_every_n_steps logging_first_step logging_strategy",
    "Set run_dir, the folder of logs and checkpoints": "logging_dir overwrite_output_dir "
    "save_on_each_node weights_save_path",
    "Set mode to 'min' or 'max'": "greater_is_better",
    "Set warmup_steps to a number of steps": "warmup_ratio",
    "A run resumes from its newest checkpoint. To start from another, use `hpctrain checkpoints import`": (
        "ckpt_path ignore_data_skip resume_from_checkpoint"
    ),
    "To write the weights to a file, use `hpctrain checkpoints export`": "load_best_model_at_end "
    "model_registry push_to_hub save_only_model save_safetensors",
    "Use callbacks=[hpctrain.EarlyStopping(…)]": "early_stop_callback",
    "Training ends early only if a callback such as EarlyStopping ends it": "min_epochs min_steps",
    "Use on_bad_loss='stop', which is the default": "terminate_on_nan",
    "Use `hpctrain profile` or `hpctrain report`": "log_gpu_memory profiler",
    "The progress line appears only in terminals": "disable_tqdm enable_progress_bar process_position "
    "progress_bar_refresh_rate",
    "Set torch.backends.cudnn.benchmark": "benchmark",
    "Call torch.autograd.set_detect_anomaly(True)": "detect_anomaly",
    "Call torch.use_deterministic_algorithms(True)": "deterministic full_determinism",
    "Call torch.set_float32_matmul_precision('high')": "tf32",
    "Do it in the module: in __init__, or in training_step": "automatic_optimization label_smoothing_factor "
    "neftune_noise_alpha prepare_data_per_node stochastic_weight_avg sync_batchnorm track_grad_norm "
    "truncated_bptt_steps",
    "hpctrain has no counterpart. Remove it": "barebones enable_autolog_hparams enable_model_summary "
    "eval_accumulation_steps inference_mode log_level move_metrics_to_cpu weights_summary",
}
#: Names of settings that hpctrain does not have, and the remedy.
REFUSED = {name: remedy for remedy, names in _REMEDIES.items() for name in names.split()}

#: Callbacks of Lightning, and what replaces them.
_CALLBACKS = {
    "EarlyStopping": "hpctrain.EarlyStopping",
    "GradientAccumulationScheduler": "accumulate_grad_batches, which remains constant",
    "LearningRateMonitor": "the metrics of training_step, to which you can add the learning rate",
    "ModelCheckpoint": "the Trainer settings checkpoint_every, keep_last, keep_best and monitor",
    "RichProgressBar": "the built-in progress line, which appears in terminals",
    "TQDMProgressBar": "the built-in progress line, which appears in terminals",
    "Timer": "`hpctrain submit --time`",
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
                remedy = REFUSED[name] if method == "fit" else "hpctrain uses the weights of the module"
                raise UserError(f"{method}(ckpt_path={value!r}): ckpt_path is not supported. {remedy}.")
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


def canonical_settings(
    given: Mapping[str, object], known: Iterable[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings under hpctrain's names, and for each its name and value in the user's call.

    Raises:
        UserError: a setting is unknown or not supported, or two settings contradict each other.
    """
    known = list(known)
    result: dict[str, object] = {}
    calls: dict[str, str] = {}
    for name, value in given.items():
        if _has_no_effect(name, value, known):
            continue
        call = f"{name}={value!r}"
        for setting, meaning in _translate(name, value, given).items():
            if setting not in known:
                if setting in REFUSED:
                    raise UserError(f"Trainer({call}): {name} is not supported. {REFUSED[setting]}.")
                raise UserError(f"Trainer has no setting {setting!r}. {suggest(setting, known)}")
            if setting in result and result[setting] != meaning:
                raise UserError(
                    f"{calls[setting]} and {call} contradict each other: {setting} is "
                    f"{result[setting]!r} and {meaning!r}. Set only one of them."
                )
            result[setting], calls[setting] = meaning, call
    return result, calls


def _has_no_effect(name: str, value: object, known: list[str]) -> bool:
    """Return true if the value is the default of another trainer, with the same effect as hpctrain's."""
    if value is None and name not in known:
        return True
    return any(type(value) is type(each) and value == each for each in _NO_EFFECT.get(name, ()))


def _translate(name: str, value: Any, given: Mapping[str, object]) -> dict[str, Any]:
    """Return a setting under hpctrain's name, or the settings with the same meaning.

    Raises:
        UserError: the value is not supported.
    """
    if name == "gpus":
        if value in (0, "", []) and value is not False:
            return {"accelerator": "cpu"}
        # A number as a string is an index, as in Lightning before version 1.5.
        is_index = isinstance(value, str) and value.strip().isdecimal()
        return {"accelerator": "gpu", "devices": [int(value)] if is_index else _selected(value, given)}
    if name == "devices" and given.get("accelerator") in ("gpu", "cuda"):
        return {name: _selected(value, given)}
    if name == "auto_select_gpus" and isinstance(value, bool):
        return {}  # see `_selected`
    if name == "num_processes":
        return {"accelerator": "cpu", "devices": value} if value != 1 else {}
    if name == "use_amp" and value is True:
        has_format = str(given.get("precision")).startswith(("16", "bf16"))
        return {} if has_format else {"precision": "16-mixed"}
    name = ALIASES.get(name, name)
    if name == "accelerator" and value not in ("auto", "cpu", "gpu"):
        if value == "cuda":
            return {name: "gpu"}
        name = "strategy"  # as in Lightning before version 1.5
        if value in ("tpu", "ipu", "hpu", "mps"):
            raise UserError(f"Trainer(accelerator={value!r}): {REFUSED['tpu_cores']}.")
    if name == "strategy":
        # A `BaguaStrategy` has its settings.
        own = getattr(value, "trainer_settings", None)
        return own or (_STRATEGIES.get(value) if isinstance(value, str) else None) or {name: value}
    return {name: value}


def _selected(gpus: Any, given: Mapping[str, object]) -> Any:
    """Return the devices for a number of GPUs, according to `auto_select_gpus`."""
    match given.get("auto_select_gpus"), gpus:
        case True, -1 | "-1":
            return "auto"
        case False, int() if gpus > 0:
            return list(range(gpus))
    return gpus  # hpctrain selects free GPUs
