"""Settings under the names of Lightning, Hugging Face and torch."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import UserError
from hpctrain.training.setting_names import ALIASES, EXPLAINED
from hpctrain.training.trainer_config import TrainerConfig


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_norm", 1.0),
        ({"max_grad_norm": 1.0}, "gradient_clip_norm", 1.0),
        ({"log_every_n_steps": 5}, "log_every", 5),
        ({"save_steps": 50}, "checkpoint_every", 50),
        ({"precision": 16}, "precision", "16-mixed"),
        ({"precision": "bf16"}, "precision", "bf16-mixed"),
        ({"precision": 32}, "precision", "32"),
        ({"precision": "32-true"}, "precision", "32"),
        ({"logger": False}, "loggers", []),
        ({"callbacks": None}, "callbacks", ()),
        ({"accelerator": "auto", "devices": "auto"}, "devices", "auto"),
    ],
)
def test_settings_of_other_trainers_are_accepted(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(TrainerConfig(max_steps=1, **settings), name) == value


def test_single_logger_needs_no_list() -> None:
    (logger,) = TrainerConfig(max_steps=1, logger="csv").loggers
    assert logger.name == "csv"


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("ModelCheckpoint", "Use the Trainer settings checkpoint_every, keep_last, keep_best and monitor"),
        ("EarlyStopping", "Use hpctrain.EarlyStopping"),
        ("MyCallback", "Subclass hpctrain.Callback"),
    ],
)
def test_callbacks_of_lightning_get_a_hint(name: str, replacement: str) -> None:
    with pytest.raises(UserError, match=f"which is not an hpctrain.Callback. {replacement}"):
        TrainerConfig(max_steps=1, callbacks=[type(name, (), {})()])


def test_every_alias_names_a_setting_and_is_not_one() -> None:
    assert set(ALIASES.values()) <= set(TrainerConfig.__dataclass_fields__)
    assert not {*ALIASES, *EXPLAINED} & set(TrainerConfig.__dataclass_fields__)
    assert not ALIASES.keys() & EXPLAINED.keys()


@pytest.mark.parametrize("name", sorted(EXPLAINED))
def test_unsupported_settings_are_explained(name: str) -> None:
    with pytest.raises(UserError, match=rf"^Trainer\({name}=1\): {name} ") as caught:
        TrainerConfig(max_steps=1, **{name: 1})
    assert "Did you mean" not in str(caught.value)


#: The arguments of Lightning's Trainer, versions 1 and 2.
LIGHTNING = """
    accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs
    min_epochs max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches
    limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch
    num_sanity_val_steps log_every_n_steps enable_checkpointing enable_progress_bar
    enable_model_summary accumulate_grad_batches gradient_clip_val gradient_clip_algorithm
    deterministic benchmark inference_mode use_distributed_sampler profiler detect_anomaly barebones
    plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir enable_autolog_hparams
    model_registry gpus auto_select_gpus tpu_cores ipus hpus num_processes auto_lr_find
    auto_scale_batch_size track_grad_norm weights_summary weights_save_path checkpoint_callback
    progress_bar_refresh_rate process_position prepare_data_per_node truncated_bptt_steps
    terminate_on_nan move_metrics_to_cpu multiple_trainloader_mode replace_sampler_ddp
    resume_from_checkpoint stochastic_weight_avg amp_level amp_backend flush_logs_every_n_steps
    log_gpu_memory reload_dataloaders_every_epoch distributed_backend
"""


def test_every_lightning_setting_is_known() -> None:
    assert not {*LIGHTNING.split()} - {*ALIASES, *EXPLAINED, *TrainerConfig.__dataclass_fields__}


def test_setting_given_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"gradient_clip_norm=2\.0 and max_grad_norm=1\.0 are the same"):
        TrainerConfig(max_steps=1, gradient_clip_norm=2.0, max_grad_norm=1.0)


def test_misspelled_setting_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"has no setting 'max_step'. Did you mean 'max_steps'"):
        TrainerConfig(max_step=1)
