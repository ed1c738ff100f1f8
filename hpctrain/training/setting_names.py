"""Translate settings and arguments of other trainers, such as Lightning's, to those of hpctrain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.errors import UserError
from hpctrain.text import suggest

#: Names in Lightning, Hugging Face and torch with the same meaning and values.
_ALIASES = {
    **dict.fromkeys(("default_root_dir", "output_dir"), "run_dir"),
    **dict.fromkeys(("every_n_train_steps", "save_steps"), "checkpoint_every"),
    **dict.fromkeys(("gradient_clip_val", "max_grad_norm"), "gradient_clip_norm"),
    **dict.fromkeys(("log_every_n_steps", "logging_steps"), "log_every"),
    **dict.fromkeys(("logger", "report_to"), "loggers"),
    **dict.fromkeys(("distributed_backend", "plugins"), "strategy"),
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "num_sanity_val_steps": "sanity_val_batches",
    "num_train_epochs": "max_epochs",
    "save_total_limit": "keep_last",
}
#: Names of strategies of other trainers, and the settings with the same meaning.
_STRATEGIES: dict[str, dict[str, Any]] = {
    **{key: {"strategy": "ddp"} for key in ("bagua", "ddp_find_unused_parameters_false")},
    **{key: {"strategy": "ddp_spawn"} for key in ("ddp_fork", "ddp_notebook")},
    **{key: {"strategy": "fsdp"} for key in ("ddp_fully_sharded", "fsdp_native")},
    "cuda": {"accelerator": "gpu"},
    "ddp_cpu": {"strategy": "ddp_spawn", "accelerator": "cpu"},
    "ddp_find_unused_parameters_true": {"strategy": "ddp", "find_unused_parameters": True},
}
#: Settings of which hpctrain supports one value, and this value.
_CONSTANTS: dict[str, object] = {
    **dict.fromkeys(("auto_lr_find", "auto_scale_batch_size", "benchmark", "detect_anomaly"), False),
    **dict.fromkeys(("deterministic", "enable_model_summary", "fast_dev_run", "sync_batchnorm"), False),
    **dict.fromkeys(("checkpoint_callback", "enable_checkpointing", "enable_progress_bar"), True),
    **dict.fromkeys(("replace_sampler_ddp", "terminate_on_nan", "use_distributed_sampler"), True),
    **dict.fromkeys((f"limit_{kind}_batches" for kind in ("train", "val", "test", "predict")), 1.0),
    "amp_backend": "native",
    "check_val_every_n_epoch": 1,
    "val_check_interval": 1.0,
}
_REMEDIES = {
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "A run resumes from its newest checkpoint"),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size"), "Set global_batch_size"),
    **dict.fromkeys(("learning_rate", "lr", "weight_decay"), "Set it in configure_optimizers"),
    **dict.fromkeys(("hpus", "ipus", "tpu_cores"), "hpctrain trains only on GPUs and CPUs"),
    "profiler": "To profile a run, use `hpctrain profile`",
}


def canonical_settings(call: Mapping[str, Any], names: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings under hpctrain's names, and the name and value of each in the user's call."""
    settings, origins = dict[str, Any](), dict[str, str]()
    for name, value in call.items():
        origin = f"{name}={value!r}"
        for setting, meaning in _translate(name, value, call, names).items():
            if setting in _REMEDIES:
                raise UserError(f"Trainer({origin}): {name} is not supported. {_REMEDIES[setting]}.")
            if setting not in names:
                raise UserError(f"Trainer has no setting {setting!r}. {suggest(setting, names)}")
            if setting in settings and settings[setting] != meaning:
                raise UserError(
                    f"{origins[setting]} and {origin} contradict each other: {setting} is "
                    f"{settings[setting]!r} and {meaning!r}. Set only one of them."
                )
            settings[setting], origins[setting] = meaning, origin
    return settings, origins


def _translate(name: str, value: Any, call: Mapping[str, object], names: list[str]) -> Mapping[str, Any]:
    """Return the settings with the same meaning; empty if the value has no effect."""
    if value is None and (name not in names or name in ("accelerator", "callbacks", "strategy")):
        return {}
    if name in _CONSTANTS:
        if type(value) is type(_CONSTANTS[name]) and value == _CONSTANTS[name]:
            return {}
        raise UserError(f"Trainer({name}={value!r}): hpctrain supports only {name}={_CONSTANTS[name]!r}.")
    match name, value:
        case ("accelerator", "auto") | ("gradient_clip_val", 0) | ("max_steps" | "max_epochs", -1):
            return {}
        case ("auto_select_gpus" | "logger", bool()) | ("num_processes", 1) | ("use_amp", False):
            return {}
        case "gradient_clip_algorithm", "norm" | "value" if value == "norm" or "gradient_clip_val" in call:
            return {}
        case "gradient_clip_val", _ if call.get("gradient_clip_algorithm") == "value":
            return {"gradient_clip_value": value}
        case "gpus", 0 | "" | []:
            return {"accelerator": "cpu"}
        case "gpus", str() if value.strip().isdecimal():  # an index, as in Lightning before version 1.5
            return {"accelerator": "gpu", "devices": [int(value)]}
        case "gpus", _:
            return {"accelerator": "gpu", "devices": _select(value, call)}
        case "devices", _ if call.get("accelerator") in ("gpu", "cuda"):
            return {name: _select(value, call)}
        case "num_processes", _:
            return {"accelerator": "cpu", "devices": value}
        case "use_amp", True:
            return {} if str(call.get("precision")).startswith(("16", "bf16")) else {"precision": "16-mixed"}
        case "accelerator", str() if value not in ("cpu", "gpu"):
            name = "strategy"  # as in Lightning before version 1.5
    name = _ALIASES.get(name, name)
    if name == "strategy" and isinstance(value, str):
        return _STRATEGIES.get(value, {name: value})
    if name == "strategy" and type(value).__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise UserError(
            f"strategy is a {type(value).__name__} of Lightning. Pass the name of a strategy, such as 'ddp', "
            "and its arguments as settings of the Trainer."
        )
    return getattr(value, "trainer_settings", None) or {name: value}  # of a `BaguaStrategy`


def _select(gpus: Any, call: Mapping[str, object]) -> Any:
    match call.get("auto_select_gpus"), gpus:
        case True, -1 | "-1":
            return "auto"
        case False, int() if gpus > 0:
            return list(range(gpus))
    return gpus  # hpctrain selects free GPUs
