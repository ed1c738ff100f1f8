"""Settings of the `Trainer`, and their validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from hpctrain.checkpoint.io.checkpoint_dir import Retention
from hpctrain.errors import UserError
from hpctrain.telemetry.hparams import plain_hparams
from hpctrain.telemetry.loggers import Logger, find_loggers
from hpctrain.training.base.device_selection import Devices, parse_devices
from hpctrain.training.base.precision import canonical_precision
from hpctrain.training.callbacks import Callback
from hpctrain.training.setting_names import canonical_settings

#: In-memory folder on Linux nodes.
_SHARED_MEMORY = Path("/dev/shm")

#: Grains of a batch by default: divisible by 1, 2, 3, 4, 6, 8, 12 and 24 ranks.
_DEFAULT_GRAINS = 24


class _Rule(NamedTuple):
    """Requirement of some settings."""

    settings: tuple[str, ...]
    requirement: str
    """End of the message."""
    values: tuple[object, ...] = ()
    """Values that meet it."""
    is_met: Callable[[Any], bool] = lambda _: False
    """Test for other values."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_natural(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_positive(value: Any) -> bool:
    return (type(value) is int or isinstance(value, float)) and value > 0


_COUNT, _NUMBER = "an integer of at least 1", "a number above 0"
_OPTIONAL_COUNTS = (
    *("max_steps", "max_epochs", "lr_reference_batch_size", "num_nodes", "grain_size", "witness_every"),
    *("keep_last", "keep_every", "log_every", "prefetch_factor", "replica_check_every"),
)
_RULES = (
    _Rule(_OPTIONAL_COUNTS, _COUNT, (None,), _is_count),
    _Rule(("global_batch_size", "accumulate_grad_batches"), _COUNT, (), _is_count),
    _Rule(("micro_batch_size",), f"{_COUNT} or 'auto'", (None, "auto"), _is_count),
    _Rule(("warmup_steps", "sanity_val_batches", "num_workers"), "an integer of at least 0", (), _is_natural),
    _Rule(("keep_best",), "an integer of at least 0", (), _is_natural),
    _Rule(("gradient_clip_norm", "gradient_clip_value", "bucket_cap_mb"), _NUMBER, (None,), _is_positive),
    _Rule(("dataloader_timeout_s",), _NUMBER, (), _is_positive),
    _Rule(("loss_spike_threshold",), f"{_NUMBER}, 'auto' or None", (None, "auto"), _is_positive),
    _Rule(("checkpoint_every",), "a number of steps (at least 1), 'auto' or None", (None, "auto"), _is_count),
    _Rule(("validate_every",), "a number of steps (at least 1), 'epoch' or None", (None, "epoch"), _is_count),
    _Rule(("accelerator",), "'auto', 'cpu' or 'gpu'", ("auto", "cpu", "gpu")),
    _Rule(("lr_scaling",), "'linear' or 'sqrt'", ("linear", "sqrt")),
    _Rule(("mode",), "'min' or 'max'", ("min", "max")),
    _Rule(("on_bad_loss",), "'stop', 'skip', 'rollback' or None", ("stop", "skip", "rollback", None)),
    _Rule(
        ("memory_copies",),
        "True, False or the maximum number of steps to repeat after a failure (at least 1)",
        (True, False),
        _is_natural,
    ),
    _Rule(
        ("seed",),
        "an integer that fits in 64 bits",
        is_met=lambda value: type(value) is int and -(2**63) <= value < 2**63,
    ),
    _Rule(
        ("compile",),
        "True, False or a dict of torch.compile arguments",
        is_met=lambda value: isinstance(value, (bool, Mapping)),
    ),
)


class _AcceptsAliases(type):
    """Metaclass of settings that accepts the names of other trainers."""

    def __call__(cls, **given: Any) -> Any:
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        settings, calls = canonical_settings(given, names)
        made: Any = cls.__new__(cls)  # type: ignore[call-overload]
        made.given = {name: call for name, call in calls.items() if settings[name] is not None}
        made.__init__(**settings)
        return made


@dataclass(kw_only=True)
class TrainerConfig(metaclass=_AcceptsAliases):
    """The settings of a `Trainer`, as in docs/training.md.

    `resolve_strategy` checks those that depend on strategy and algorithm.

    Raises:
        UserError: a setting is out of range or unknown, or neither or both of `max_steps` and `max_epochs`
            are set.
    """

    given: ClassVar[Mapping[str, str]] = {}
    """Settings that the user passed, without those that are None, and the name and value in the call."""
    max_steps: int | None = None
    """Number of optimizer steps after which training ends. Set either this or `max_epochs`."""
    max_epochs: int | None = None
    """Number of epochs after which training ends. Set either this or `max_steps`."""
    global_batch_size: int = 32
    """Samples per optimizer step, summed over all ranks; the same for any number of ranks."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Maximum samples per forward and backward pass of a rank."""
    accumulate_grad_batches: int = 1
    """Batches per optimizer step. A DataLoader's batch size is multiplied by this number."""
    strategy: str = "auto"
    """Strategy, from docs/strategies.md. `auto` uses `HPCTRAIN_STRATEGY` if it is set, otherwise `ddp`."""
    algorithm: str | Any = "allreduce"
    """Algorithm with which the ranks of `ddp` exchange gradients or weights: a name, or an `Algorithm`."""
    bucket_cap_mb: float | None = None
    """Size of gradient buckets in megabytes, with `ddp`, `ddp_spawn`, `ddp2` and `zero1`."""
    static_graph: bool = False
    """Assert that every step uses the same parameters in the same way; torch does not check this."""
    find_unused_parameters: bool = False
    """Allow steps that do not use all parameters."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu` requires GPUs, `cpu` ignores them, `auto` uses them if there are any."""
    devices: Devices | None = None
    """Devices of this node for training: a number, -1 for all, or `auto` for all free ones.

    Without a launcher, one process is started per device, except with `dp`; indices such as `[1, 3]` or
    `"1,3"` select GPUs. With a launcher, the number must be that of the node's ranks. None means the devices
    of the launcher, otherwise one device, or `auto` with `ddp_spawn` and `dp`.
    """
    num_nodes: int | None = None
    """Number of nodes, which must be that of the launch; None for any number."""
    precision: str = "32"
    """Number format: `32`, `bf16-mixed`, `16-mixed` or `bf16-true`."""
    gradient_clip_norm: float | None = None
    """Maximum norm of all gradients; larger gradients are scaled down."""
    gradient_clip_value: float | None = None
    """Maximum absolute value of each gradient element; larger values are clipped."""
    lr_reference_batch_size: int | None = None
    """Batch size that the learning rate was tuned for; the rate is scaled to `global_batch_size`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """`linear` scales the rate by the ratio of the batch sizes (for SGD), `sqrt` by its root (for Adam)."""
    warmup_steps: int = 0
    """Steps of the learning-rate warm-up: from the configured rate if it is scaled up, otherwise from 0."""
    recompute: Sequence[str] = ()
    """Submodules whose activations the backward pass recomputes."""
    compile: bool | Mapping[str, Any] = False
    """Compile the module's steps with `torch.compile`. Pass a mapping to set its arguments."""
    checkpoint_every: int | Literal["auto"] | None = "auto"
    """Steps between checkpoints. In addition, a stop and the end of training always save."""
    checkpoint_async: bool = True
    """Continue training while a checkpoint is written. Training pauses only while the state is copied."""
    keep_last: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Also keep checkpoints whose step is a multiple of this number. None keeps no additional ones."""
    keep_best: int = 0
    """Number of best checkpoints to keep in addition. Unless it is 0, each validated state is saved."""
    monitor: str = "val_loss"
    """Metric for `keep_best`: a name that `validation_step` or `training_step` returns."""
    mode: Literal["min", "max"] = "min"
    """`min` if lower values of `monitor` are better, `max` if higher values are better."""
    local_checkpoints: str | os.PathLike[str] | None = None
    """Fast folder on each node, for the first copy of checkpoints; `auto` uses /dev/shm or TMPDIR."""
    on_bad_loss: Literal["stop", "skip", "rollback"] | None = "stop"
    """Reaction to a loss that is not finite, or is far above previous losses."""
    loss_spike_threshold: float | Literal["auto"] | None = "auto"
    """Distance from the median of the last losses that is bad, in robust standard deviations."""
    replica_check_every: int | None = 100
    """Number of steps in which the complete replicas of the ranks are compared once, one slice per step."""
    memory_copies: bool | int = True
    """Copies of the state in the memory of the nodes, so that a failure repeats few steps."""
    validate_every: int | Literal["epoch"] | None = "epoch"
    """Steps between validations, or `epoch` for the end of each epoch. Training ends with a validation."""
    sanity_val_batches: int = 1
    """Batches per rank to validate before the first step, to detect errors in the validation immediately."""
    callbacks: Sequence[Callback] = ()
    """Callbacks, such as `EarlyStopping`."""
    log_every: int = 1
    """Steps between lines in `metrics.jsonl`."""
    loggers: Sequence[str | Logger] = ()
    """Additional metric loggers: `csv`, `tensorboard`, `wandb`, `mlflow`, `neptune`, or your own."""
    elastic_determinism: bool = False
    """Make every bit of the result independent of the number of ranks; see docs/exactness.md."""
    grain_size: int | None = None
    """Samples of a batch that are computed together with `elastic_determinism`."""
    witness_every: int | None = None
    """Steps between comparisons of the same gradient from two ranks, to detect faulty devices."""
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    hparams: Any = None
    """Hyper-parameters to record, in addition to the arguments of the script."""
    record_samples: bool = False
    """Write the indices of all trained samples to `samples/`."""
    run_dir: str | os.PathLike[str] | None = None
    """Output folder; None uses the run folder of the job. Without either folder, nothing is written."""
    num_workers: int = 0
    """Data workers per rank; 0 loads batches in the rank itself."""
    prefetch_factor: int = 2
    """Batches that each data worker prefetches."""
    dataloader_timeout_s: float = 900.0
    """Maximum wait for a batch from a data worker, in seconds."""
    seed_samples: bool = True
    """Seed the global random generators for each fetched sample."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Function that combines samples into a batch. None uses torch's default."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UserError(
                f"max_steps is {self.max_steps!r} and max_epochs is {self.max_epochs!r}. Set exactly "
                "one of them."
            )
        for rule in _RULES:
            for name in rule.settings:
                value = getattr(self, name)
                if not (any(value is each or value == each for each in rule.values) or rule.is_met(value)):
                    raise UserError(f"{name} is {value!r}, but must be {rule.requirement}.")
        if isinstance(self.recompute, str):
            self.recompute = (self.recompute,)
        if self.recompute and self.compile is not False:
            raise UserError(
                f"recompute is {self.recompute!r} and compile is {self.compile!r}, but torch.compile "
                "itself decides which activations to recompute. Set only one of them."
            )
        if isinstance(self.compile, Mapping):
            _check_arguments("compile", self.compile, torch.compile)
        if isinstance(self.callbacks, Callback):
            self.callbacks = (self.callbacks,)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks contains {callback!r}, which is not an hpctrain.Callback. Subclass "
                    "hpctrain.Callback, or use hpctrain.EarlyStopping. Instead of ModelCheckpoint, use the "
                    "settings checkpoint_every, keep_last, keep_best and monitor."
                )
        self._check_loss_guard()
        self.loggers = find_loggers(self.loggers)
        try:
            self.hparams = plain_hparams(self.hparams or {})
        except TypeError as error:
            raise UserError(f"{error}.") from None
        selects_gpus = self.devices is not None and isinstance(parse_devices(self.devices), list)
        if selects_gpus and self.accelerator == "cpu":
            raise UserError(
                f"{self.given['devices']} selects GPUs, but {self.given['accelerator']}. Set devices to the "
                "number of processes."
            )
        self.precision = canonical_precision(self.precision)
        self._set_grain_size()

    def _set_grain_size(self) -> None:
        for name in ("grain_size", "witness_every"):
            if not self.elastic_determinism and getattr(self, name) is not None:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but elastic_determinism is False, so {name} would "
                    f"have no effect. Set elastic_determinism=True, or remove {name}."
                )
        if not self.elastic_determinism:
            return
        if not self.seed_samples:
            raise UserError(
                "elastic_determinism is True, but seed_samples is False, so random numbers in the data set "
                "would depend on the number of ranks. Remove seed_samples=False."
            )
        size = self.micro_batch_size
        if size == "auto":
            raise UserError(
                "micro_batch_size is 'auto', but elastic_determinism needs a fixed size, because the result "
                "depends on which samples are processed together. Remove micro_batch_size='auto', and set "
                "grain_size."
            )
        if self.grain_size is None:
            self.grain_size = size or max(4, self.global_batch_size // _DEFAULT_GRAINS)
        elif size is not None and size % self.grain_size:
            raise UserError(
                f"micro_batch_size is {size}, but grain_size is {self.grain_size}. micro_batch_size must be "
                "a multiple of grain_size."
            )

    def _check_loss_guard(self) -> None:
        if self.on_bad_loss == "rollback" and self.checkpoint_every is None:
            raise UserError(
                "on_bad_loss is 'rollback' and checkpoint_every is None, so there would be no checkpoint "
                "for a rollback. Set checkpoint_every, or use on_bad_loss='skip'."
            )
        if self.on_bad_loss == "rollback" and self.local_checkpoints is not None:
            raise UserError(
                f"on_bad_loss is 'rollback' and local_checkpoints is {self.local_checkpoints!r}, but a "
                "rollback cannot load local checkpoints. Set only one of them."
            )

    @property
    def retention(self) -> Retention:
        return Retention(
            last=self.keep_last,
            every=self.keep_every,
            best=self.keep_best,
            mode=self.mode,
            metric=self.monitor,
        )

    def second_tier(self, environ: Mapping[str, str]) -> Path | None:
        """Return the folder of the local tier; None if it is not used."""
        if self.local_checkpoints is None:
            return None
        if self.local_checkpoints != "auto":
            return Path(self.local_checkpoints).absolute()
        return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(environ.get("TMPDIR", "/tmp"))


def _check_arguments(name: str, arguments: Mapping[str, Any], of: Callable[..., Any]) -> None:
    _, *parameters = signature(of).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for argument in arguments:
        if argument not in known:
            raise UserError(
                f"{name} contains {argument!r}, which torch.{of.__name__} does not accept. Choose from "
                f"{', '.join(known)}."
            )
