"""Settings under the names of Lightning, Hugging Face and torch."""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.errors import UserError
from hpctrain.training.algorithms import BaguaStrategy
from hpctrain.training.base.device_selection import choose_devices
from hpctrain.training.setting_names import REFUSED
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
        ({"accelerator": "cuda"}, "accelerator", "gpu"),
        ({"accelerator": "ddp2", "gpus": 4}, "strategy", "ddp2"),
        ({"distributed_backend": "dp"}, "strategy", "dp"),
        ({"strategy": "ddp_fully_sharded"}, "strategy", "fsdp"),
        ({"accelerator": "ddp_cpu", "num_processes": 2}, "devices", 2),
        ({"accelerator": "ddp_cpu", "num_processes": 2}, "strategy", "ddp_spawn"),
        ({"strategy": "ddp_find_unused_parameters_true"}, "find_unused_parameters", True),
        ({"use_amp": True, "amp_backend": "native"}, "precision", "16-mixed"),
        ({"use_amp": True, "precision": "bf16"}, "precision", "bf16-mixed"),
        ({"gradient_clip_val": 0.0, "max_epochs": -1}, "gradient_clip_norm", None),
        ({"enable_model_summary": False, "weights_summary": None}, "precision", "32"),
        ({"replace_sampler_ddp": True, "deterministic": False, "max_time": None}, "precision", "32"),
    ],
)
def test_settings_of_other_trainers_are_accepted(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(TrainerConfig(max_steps=1, **settings), name) == value


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"gpus": 1}, [1]),
        ({"gpus": "0"}, [0]),
        ({"gpus": "1"}, [1]),
        ({"gpus": [1]}, [1]),
        ({"gpus": "1, 3"}, [1, 3]),
        ({"gpus": [0, 1]}, [0, 1]),
        ({"gpus": -1}, [0, 1, 2, 3]),
        ({"gpus": "-1"}, [0, 1, 2, 3]),
        ({"gpus": 2, "auto_select_gpus": True}, [1, 2]),
        ({"gpus": 2, "auto_select_gpus": False}, [0, 1]),
        ({"gpus": -1, "auto_select_gpus": True}, [1, 2, 3]),
        ({"accelerator": "gpu", "devices": 2}, [1, 2]),
        ({"accelerator": "gpu", "devices": 2, "auto_select_gpus": False}, [0, 1]),
    ],
)
def test_forms_of_gpus_select_those_of_four_of_which_the_first_is_busy(
    call: dict[str, Any], expected: list[int]
) -> None:
    settings = TrainerConfig(max_steps=1, **call)
    assert settings.accelerator == "gpu"
    assert settings.devices is not None
    assert choose_devices(settings.devices, 4, busy=[0]) == expected


@pytest.mark.parametrize("gpus", [0, [], ""])
def test_no_gpus_mean_the_cpu(gpus: Any) -> None:
    settings = TrainerConfig(max_steps=1, gpus=gpus)
    assert (settings.accelerator, settings.devices) == ("cpu", None)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        *(("gradient_allreduce", "AllReduce"), ("bytegrad", "ByteGrad"), ("qadam", "QAdam")),
        *(("decentralized", "Decentralized"), ("async", "AsyncAveraging")),
        ("low_precision_decentralized", "LowPrecisionDecentralized"),
    ],
)
def test_bagua_strategy_is_ddp_with_its_algorithm(algorithm: str, name: str) -> None:
    settings = TrainerConfig(max_steps=1, strategy=BaguaStrategy(algorithm=algorithm))
    assert (settings.strategy, type(settings.algorithm).__name__) == ("ddp", name)
    with pytest.raises(UserError, match=f"BaguaStrategy received flat=1, but the arguments of '{algorithm}'"):
        BaguaStrategy(algorithm, flat=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator": "tpu"}, r"accelerator='tpu'\): hpctrain trains only on GPUs and CPUs"),
        ({"tpu_cores": 8}, "hpctrain trains only on GPUs and CPUs"),
        ({"amp_backend": "apex"}, "hpctrain does not support apex"),
        ({"gpus": 2, "devices": 3}, "gpus=2 and devices=3 contradict each other"),
        ({"gpus": 2, "accelerator": "cpu"}, "accelerator is 'gpu' and 'cpu'"),
        ({"accelerator": "cpu", "devices": [1]}, r"devices=\[1\] selects GPUs, but accelerator='cpu'"),
        ({"replace_sampler_ddp": False}, "divides the data among the ranks itself"),
        ({"profiler": "simple"}, "use `hpctrain profile`"),
        ({"plugins": "ddp_sharded"}, "strategy='ddp_sharded'"),
        ({"gradient_clip_algorithm": "value"}, "Set gradient_clip_value"),
        ({"limit_val_batches": 3}, "Pass a smaller data set"),
        ({"enable_progress_bar": False}, "The progress line appears only on terminals"),
    ],
)
def test_calls_without_a_meaning_here_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainerConfig(max_steps=1, **settings)


def test_single_logger_needs_no_list() -> None:
    (logger,) = TrainerConfig(max_steps=1, logger="csv").loggers
    assert logger.name == "csv"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_settings_are_explained(name: str) -> None:
    with pytest.raises(UserError, match=rf"^Trainer\({name}=7\): {name} is not supported\. ") as caught:
        TrainerConfig(max_steps=1, **{name: 7})
    assert "Did you mean" not in str(caught.value)


def test_setting_given_twice_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"gradient_clip_norm=2\.0 and max_grad_norm=1\.0 contradict each other"
    ):
        TrainerConfig(max_steps=1, gradient_clip_norm=2.0, max_grad_norm=1.0)


def test_misspelled_setting_gets_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"has no setting 'max_step'. Did you mean 'max_steps'"):
        TrainerConfig(max_step=1)
