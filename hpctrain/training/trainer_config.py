"""Settings of the `Trainer`, and their validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from hpctrain.checkpoint.io.retention import Retention
from hpctrain.errors import UserError
from hpctrain.telemetry.hparams import plain_hparams
from hpctrain.telemetry.loggers import Logger, find_loggers
from hpctrain.training.base.device_selection import Devices, parse_devices
from hpctrain.training.base.tensors import canonical_precision
from hpctrain.training.callbacks import Callback
from hpctrain.training.setting_names import canonical_settings

#: In-memory folder on Linux nodes.
_SHARED_MEMORY = Path("/dev/shm")

#: Grains of a batch by default: divisible by 1, 2, 3, 4, 6, 8, 12 and 24 ranks.
_DEFAULT_GRAINS = 24


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_positive(value: Any) -> bool:
    return (type(value) is int or isinstance(value, float)) and value > 0


_COUNT, _NUMBER = "an integer of at least 1", "a number above 0"
_MAX_REPEATED = "True, False or the maximum number of steps to repeat after a failure (at least 1)"
_OPTIONAL_COUNTS = (
    *("max_steps", "max_epochs", "lr_reference_batch_size", "num_nodes", "grain_size", "witness_every"),
    *("keep_last", "keep_every", "log_every", "prefetch_factor", "replica_check_every", "micro_batch_size"),
)
_NATURALS = ("warmup_steps", "sanity_val_batches", "num_workers", "keep_best")
#: Settings, the requirement for a message, permitted values, and a test of other values.
_RULES: tuple[tuple[tuple[str, ...], str, tuple[object, ...], Callable[[Any], bool] | None], ...] = (
    (_OPTIONAL_COUNTS, _COUNT, (None,), _is_count),
    (("global_batch_size", "accumulate_grad_batches"), _COUNT, (), _is_count),
    (_NATURALS, "an integer of at least 0", (), _is_natural),
    (("gradient_clip_norm", "gradient_clip_value", "bucket_cap_mb"), _NUMBER, (None,), _is_positive),
    (("dataloader_timeout_s",), _NUMBER, (), _is_positive),
    (("loss_spike_threshold",), f"{_NUMBER}, 'auto' or None", (None, "auto"), _is_positive),
    (("checkpoint_every",), "a number of steps (at least 1), 'auto' or None", (None, "auto"), _is_count),
    (("validate_every",), "a number of steps (at least 1), 'epoch' or None", (None, "epoch"), _is_count),
    (("accelerator",), "'auto', 'cpu' or 'gpu'", ("auto", "cpu", "gpu"), None),
    (("lr_scaling",), "'linear' or 'sqrt'", ("linear", "sqrt"), None),
    (("mode",), "'min' or 'max'", ("min", "max"), None),
    (("on_bad_loss",), "'stop', 'skip', 'rollback' or None", ("stop", "skip", "rollback", None), None),
    (("memory_copies",), _MAX_REPEATED, (True, False), _is_natural),
    (("seed",), "an integer that fits in 64 bits", (), lambda v: type(v) is int and -(2**63) <= v < 2**63),
    (
        ("compile",),
        "True, False or a dict of torch.compile arguments",
        (),
        lambda v: isinstance(v, bool | Mapping),
    ),
)


class _AcceptsAliases(type):
    """Metaclass of settings that accepts the names of other trainers."""

    def __call__(cls, **call: Any) -> Any:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        settings, origins = canonical_settings(call, names)
        config: Any = cls.__new__(cls)  # type: ignore[call-overload]
        config.given = {name: origin for name, origin in origins.items() if settings[name] is not None}
        config.__init__(**settings)
        return config


@dataclass(kw_only=True)
class TrainerConfig(metaclass=_AcceptsAliases):
    """The settings of a `Trainer`, which docs/training.md describes.

    `resolve_strategy` checks those that depend on strategy and algorithm.

    Raises:
        UserError: a setting is out of range or unknown, or neither or both of `max_steps` and `max_epochs`
            are set.
    """

    given: ClassVar[Mapping[str, str]] = {}
    """Settings that the user passed, without those that are None, and the name and value in the call."""
    max_steps: int | None = None
    max_epochs: int | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    accumulate_grad_batches: int = 1
    strategy: str = "auto"
    algorithm: str | Any = "allreduce"
    bucket_cap_mb: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Devices | None = None
    num_nodes: int | None = None
    precision: str = "32"
    gradient_clip_norm: float | None = None
    gradient_clip_value: float | None = None
    lr_reference_batch_size: int | None = None
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    warmup_steps: int = 0
    recompute: Sequence[str] = ()
    compile: bool | Mapping[str, Any] = False
    checkpoint_every: int | Literal["auto"] | None = "auto"
    checkpoint_async: bool = True
    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    local_checkpoints: str | os.PathLike[str] | None = None
    on_bad_loss: Literal["stop", "skip", "rollback"] | None = "stop"
    loss_spike_threshold: float | Literal["auto"] | None = "auto"
    replica_check_every: int | None = 100
    memory_copies: bool | int = True
    validate_every: int | Literal["epoch"] | None = "epoch"
    sanity_val_batches: int = 1
    callbacks: Sequence[Callback] = ()
    log_every: int = 1
    loggers: Sequence[str | Logger] = ()
    elastic_determinism: bool = False
    grain_size: int | None = None
    witness_every: int | None = None
    seed: int = 0
    hparams: Any = None
    record_samples: bool = False
    run_dir: str | os.PathLike[str] | None = None
    num_workers: int = 0
    prefetch_factor: int = 2
    dataloader_timeout_s: float = 900.0
    seed_samples: bool = True
    collate_fn: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UserError(
                f"max_steps is {self.max_steps!r} and max_epochs is {self.max_epochs!r}. Set exactly "
                "one of them; -1 counts as None."
            )
        for names, requirement, values, is_met in _RULES:
            for name in names:
                value = getattr(self, name)
                if not (value in values or (is_met is not None and is_met(value))):
                    raise UserError(f"{name} is {value!r}, but must be {requirement}.")
        if isinstance(self.recompute, str):
            self.recompute = (self.recompute,)
        if isinstance(self.callbacks, Callback):
            self.callbacks = (self.callbacks,)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks contains {callback!r}, which is not an hpctrain.Callback. Subclass "
                    "hpctrain.Callback, or use hpctrain.EarlyStopping. Instead of ModelCheckpoint, use the "
                    "settings checkpoint_every, keep_last, keep_best and monitor."
                )
        self._check_combinations()
        self.loggers = find_loggers(self.loggers)
        try:
            self.hparams = plain_hparams(self.hparams or {})
        except TypeError as error:
            raise UserError(f"{error}.") from None
        if self.devices is not None:
            parse_devices(self.devices)
        self.precision = canonical_precision(self.precision)
        if self.elastic_determinism and self.grain_size is None:
            self.grain_size = self.micro_batch_size or max(4, self.global_batch_size // _DEFAULT_GRAINS)

    def _check_combinations(self) -> None:
        elastic, size = self.elastic_determinism, self.micro_batch_size
        rolls_back = self.on_bad_loss == "rollback"
        problems = {
            f"recompute is {self.recompute!r} and compile is {self.compile!r}, but torch.compile itself "
            "decides which activations to recompute. Set only one of them.": (
                self.recompute and self.compile is not False
            ),
            "on_bad_loss is 'rollback' and checkpoint_every is None, so there would be no checkpoint for a "
            "rollback. Set checkpoint_every, or use on_bad_loss='skip'.": (
                rolls_back and self.checkpoint_every is None
            ),
            f"on_bad_loss is 'rollback' and local_checkpoints is {self.local_checkpoints!r}, but a rollback "
            "cannot load local checkpoints. Set only one of them.": (
                rolls_back and self.local_checkpoints is not None
            ),
            **{
                f"{name} is {getattr(self, name)}, but elastic_determinism is False, so {name} would have no "
                f"effect. Set elastic_determinism=True, or remove {name}.": (
                    not elastic and getattr(self, name) is not None
                )
                for name in ("grain_size", "witness_every")
            },
            "elastic_determinism is True, but seed_samples is False, so random numbers in the data set would "
            "depend on the number of ranks. Remove seed_samples=False.": elastic and not self.seed_samples,
            f"micro_batch_size is {size}, but grain_size is {self.grain_size}. micro_batch_size must be a "
            "multiple of grain_size.": (elastic and size and self.grain_size and size % self.grain_size),
        }
        for problem, applies in problems.items():
            if applies:
                raise UserError(problem)

    @property
    def retention(self) -> Retention:
        return Retention(self.keep_last, self.keep_every, self.keep_best, self.mode, self.monitor)

    def second_tier(self, environ: Mapping[str, str]) -> Path | None:
        if self.local_checkpoints is None:
            return None
        if self.local_checkpoints != "auto":
            return Path(self.local_checkpoints).absolute()
        return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(environ.get("TMPDIR", "/tmp"))
