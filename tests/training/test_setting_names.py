"""Settings under the names of Lightning, Hugging Face and torch."""

from typing import Any

import pytest

from hpctrain import Trainer, UserError
from hpctrain.training.algorithms import BaguaStrategy
from hpctrain.training.base.device_selection import choose_devices
from hpctrain.training.trainer_config import TrainerConfig


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}, "gradient_clip_norm", 1.0),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient_clip_value", 1.0),
        ({"plugins": "ddp_sharded"}, "strategy", "ddp_sharded"),
        ({"log_every_n_steps": 5}, "log_every", 5),
        ({"save_steps": 50}, "checkpoint_every", 50),
        ({"precision": 16}, "precision", "16-mixed"),
        ({"precision": "32-true"}, "precision", "32"),
        ({"logger": False}, "loggers", []),
        ({"callbacks": None}, "callbacks", ()),
        ({"accelerator": "cuda"}, "accelerator", "gpu"),
        ({"accelerator": "ddp2", "gpus": 4}, "strategy", "ddp2"),
        ({"distributed_backend": "dp"}, "strategy", "dp"),
        ({"strategy": "ddp_fully_sharded"}, "strategy", "fsdp"),
        ({"strategy": "ddp_find_unused_parameters_false"}, "strategy", "ddp"),
        ({"accelerator": "ddp_cpu", "num_processes": 2}, "devices", 2),
        ({"accelerator": "ddp_cpu", "num_processes": 2}, "strategy", "ddp_spawn"),
        ({"strategy": "ddp_find_unused_parameters_true"}, "find_unused_parameters", True),
        ({"use_amp": True, "amp_backend": "native"}, "precision", "16-mixed"),
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
        ({"gpus": "1"}, [1]),
        ({"gpus": "1, 3"}, [1, 3]),
        ({"gpus": [0, 1]}, [0, 1]),
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
        ({"tpu_cores": 8}, "hpctrain trains only on GPUs and CPUs"),
        ({"accelerator": "tpu"}, "does not support TPUs"),
        ({"amp_backend": "apex"}, "hpctrain supports only amp_backend='native'"),
        ({"replace_sampler_ddp": False}, "hpctrain supports only replace_sampler_ddp=True"),
        ({"strategy": "deepspeed_stage_2"}, "is 'deepspeed_stage_2'.* Use 'zero2'"),
        ({"strategy": "deepspeed_stage_3_offload"}, "states on the GPUs. Use 'zero3'"),
        ({"strategy": type("FSDP", (), {"__module__": "lightning.x"})()}, "is a FSDP of Lightning"),
        (
            {"strategy": BaguaStrategy("bytegrad"), "algorithm": "fp16"},
            r"^strategy=BaguaStrategy\('bytegrad'\) and algorithm='fp16' .* is ByteGrad\(…\) and 'fp16'\.",
        ),
        ({"gpus": 2, "devices": 3}, "gpus=2 and devices=3 contradict each other"),
        ({"gpus": 2, "accelerator": "cpu"}, "accelerator is 'gpu' and 'cpu'"),
        ({"gradient_clip_norm": 2.0, "max_grad_norm": 1.0}, "max_grad_norm=1.0 contradict each other"),
        ({"profiler": "simple"}, "use `hpctrain profile`"),
        ({"lr": 0.1}, r"^Trainer\(lr=0.1\): lr is not supported. Set it in configure_optimizers\.$"),
        ({"max_step": 1}, r"has no setting 'max_step'. Did you mean 'max_steps'"),
    ],
)
def test_calls_without_a_meaning_here_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(max_steps=1, **settings)
