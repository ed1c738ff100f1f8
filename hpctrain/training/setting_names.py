"""Translate settings and arguments of other trainers, such as Lightning's, to those of hpctrain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpctrain.errors import UserError
from hpctrain.text import suggest

#: Names in Lightning, Hugging Face and torch with the same meaning and values.
ALIASES = {
    "default_root_dir": "run_dir",
    "distributed_backend": "strategy",
    "every_n_train_steps": "checkpoint_every",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "gradient_clip_val": "gradient_clip_norm",
    "log_every_n_steps": "log_every",
    "logger": "loggers",
    "logging_steps": "log_every",
    "max_grad_norm": "gradient_clip_norm",
    "num_sanity_val_steps": "sanity_val_batches",
    "num_train_epochs": "max_epochs",
    "output_dir": "run_dir",
    "report_to": "loggers",
    "save_steps": "checkpoint_every",
    "save_top_k": "keep_best",
    "save_total_limit": "keep_last",
}
#: Values of other trainers, and the settings with the same meaning.
_VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "accelerator": {"cuda": {"accelerator": "gpu"}},
    "strategy": {
        "bagua": {"strategy": "ddp"},
        "ddp_cpu": {"strategy": "ddp_spawn", "accelerator": "cpu"},
        "ddp_find_unused_parameters_false": {"strategy": "ddp", "find_unused_parameters": False},
        "ddp_find_unused_parameters_true": {"strategy": "ddp", "find_unused_parameters": True},
        "ddp_fork": {"strategy": "ddp_spawn"},
        "ddp_fully_sharded": {"strategy": "fsdp"},
        "ddp_notebook": {"strategy": "ddp_spawn"},
        "ddp_sharded_spawn": {"strategy": "ddp_sharded"},
        "fsdp_native": {"strategy": "fsdp"},
    },
}
#: Values that request what hpctrain does anyway.
_DEFAULTS: dict[str, object] = {
    "accelerator": "auto",
    "amp_backend": "native",
    "check_val_every_n_epoch": 1,
    "enable_model_summary": False,
    "enable_progress_bar": True,
    "gradient_clip_algorithm": "norm",
    **dict.fromkeys(("checkpoint_callback", "enable_checkpointing", "replace_sampler_ddp"), True),
    **dict.fromkeys(("use_distributed_sampler", "terminate_on_nan"), True),
    **dict.fromkeys(("auto_lr_find", "auto_scale_batch_size", "benchmark", "detect_anomaly"), False),
    **dict.fromkeys(("deterministic", "fast_dev_run", "sync_batchnorm", "use_amp"), False),
    **dict.fromkeys((f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")), 1.0),
    "val_check_interval": 1.0,
}
_REMEDIES = {
    "A run resumes from its newest checkpoint": ("ckpt_path", "resume_from_checkpoint"),
    "Set global_batch_size, the samples per step of all ranks": ("batch_size", "per_device_train_batch_size"),
    "Set it in configure_optimizers": ("learning_rate", "lr", "weight_decay"),
    "hpctrain divides the data among the ranks itself": ("replace_sampler_ddp", "use_distributed_sampler"),
    "hpctrain does not support apex. Use precision='16-mixed'": ("amp_backend", "amp_level"),
    "Convert the module with torch.nn.SyncBatchNorm.convert_sync_batchnorm": ("sync_batchnorm",),
    "Pass a smaller data set, such as torch.utils.data.Subset": (
        *("limit_predict_batches", "limit_test_batches", "limit_train_batches", "limit_val_batches"),
        "overfit_batches",
    ),
    "Set callbacks=[hpctrain.EarlyStopping(…)]": ("early_stop_callback",),
    "Set checkpoint_every and keep_last": ("checkpoint_callback", "enable_checkpointing"),
    "Set gradient_clip_value": ("gradient_clip_algorithm",),
    "Set max_steps to a small number": ("fast_dev_run",),
    "Set strategy, such as strategy='ddp_sharded', and precision": ("plugins",),
    "Set validate_every": ("check_val_every_n_epoch", "val_check_interval"),
    "To profile a run, use `hpctrain profile`": ("profiler",),
    "Use torch.use_deterministic_algorithms(True) in the script": ("deterministic",),
    "hpctrain searches for neither learning rates nor batch sizes": ("auto_lr_find", "auto_scale_batch_size"),
    "hpctrain prints no summary of a module": ("enable_model_summary", "weights_summary"),
    "The progress line appears only on terminals, and cannot be turned off": (
        "enable_progress_bar",
        "progress_bar_refresh_rate",
    ),
    "hpctrain trains only on GPUs and CPUs": ("hpus", "ipus", "tpu_cores"),
}
#: Other names, and the remedy.
REFUSED = {name: remedy for remedy, names in _REMEDIES.items() for name in names}
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
    """Return the arguments of a method of the Trainer, of which some have Lightning's names."""
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


def canonical_settings(
    given: Mapping[str, object], known: Iterable[str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return the settings under hpctrain's names, and for each its name and value in the user's call."""
    known = list(known)
    result: dict[str, object] = {}
    calls: dict[str, str] = {}
    for name, value in given.items():
        call = f"{name}={value!r}"
        for setting, meaning in _translate(name, value, given, known).items():
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


def _translate(name: str, value: Any, given: Mapping[str, object], known: Iterable[str]) -> Mapping[str, Any]:
    """Return the settings with the same meaning; empty if the value has no effect."""
    default = _DEFAULTS.get(name, ...)
    if type(value) is type(default) and value == default:
        return {}
    if value is None and (name not in known or name in ("accelerator", "callbacks", "strategy")):
        return {}
    match name, value:
        case ("gradient_clip_val", 0) | ("max_steps" | "max_epochs", -1):  # no limit
            return {}
        case "gpus", 0 | "" | [] if value is not False:
            return {"accelerator": "cpu"}
        case "gpus", str() if value.strip().isdecimal():  # an index, as in Lightning before version 1.5
            return {"accelerator": "gpu", "devices": [int(value)]}
        case "gpus", _:
            return {"accelerator": "gpu", "devices": _selected(value, given)}
        case "devices", _ if given.get("accelerator") in ("gpu", "cuda"):
            return {name: _selected(value, given)}
        case ("auto_select_gpus", bool()) | ("num_processes", 1) | ("logger", bool()):
            return {}
        case "num_processes", _:
            return {"accelerator": "cpu", "devices": value}
        case "use_amp", True:
            has_format = str(given.get("precision")).startswith(("16", "bf16"))
            return {} if has_format else {"precision": "16-mixed"}
        case "accelerator", "tpu" | "ipu" | "hpu" | "mps":
            raise UserError(f"Trainer(accelerator={value!r}): {REFUSED['tpu_cores']}.")
    name = ALIASES.get(name, name)
    if name == "accelerator" and value not in ("auto", "cpu", "gpu", "cuda"):
        name = "strategy"  # as in Lightning before version 1.5
    own: Mapping[str, Any] | None = getattr(value, "trainer_settings", None)  # of a `BaguaStrategy`
    meaning = _VALUES.get(name, {}).get(value) if isinstance(value, str) else own
    return meaning or {name: value}


def _selected(gpus: Any, given: Mapping[str, object]) -> Any:
    """Return the devices for a number of GPUs, according to `auto_select_gpus`."""
    match given.get("auto_select_gpus"), gpus:
        case True, -1 | "-1":
            return "auto"
        case False, int() if gpus > 0:
            return list(range(gpus))
    return gpus  # hpctrain selects free GPUs
