"""Settings of the `Trainer`, and their validation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from hpctrain.checkpoint.io.retention import Retention
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

#: Settings that are integers of at least 1; all but `_REQUIRED_COUNTS` may be None.
_COUNTS = (
    "max_steps",
    "max_epochs",
    "global_batch_size",
    "lr_reference_batch_size",
    "micro_batch_size",
    "accumulate_grad_batches",
    "num_nodes",
    "grain_size",
    "witness_every",
    "keep_last",
    "keep_every",
    "log_every",
    "prefetch_factor",
    "replica_check_every",
)


_REQUIRED_COUNTS = ("global_batch_size", "accumulate_grad_batches")


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
    """The settings of a `Trainer`. `resolve_strategy` checks those that depend on strategy and algorithm.

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
    """Samples per optimizer step, summed over all ranks; the same for any number of ranks.

    If it is not set and `fit` receives a DataLoader, the DataLoader's batch size is used.
    """
    micro_batch_size: int | Literal["auto"] | None = None
    """Maximum samples per forward and backward pass of a rank.

    The rank accumulates gradients over its share of a batch, so the gradient is the same. `auto` finds the
    largest size that fits into GPU memory; None uses the complete share.
    """
    accumulate_grad_batches: int = 1
    """Batches per optimizer step. A DataLoader's batch size is multiplied by this number.

    With `global_batch_size`, this is the number of passes into which each rank divides its share.
    """
    strategy: str = "auto"
    """Strategy, from docs/strategies.md. `auto` uses `HPCTRAIN_STRATEGY` if it is set, otherwise `ddp`."""
    algorithm: str | Any = "allreduce"
    """Algorithm with which the ranks of `ddp` exchange gradients or weights: a name, or an `Algorithm`.

    The names are `allreduce`, `fp16`, `bf16`, `powersgd`, `bytegrad`, `qadam`, `decentralized`,
    `low_precision_decentralized`, `async` and `local_sgd`. To set arguments, pass an `Algorithm`.
    """
    bucket_cap_mb: float | None = None
    """Size of gradient buckets in megabytes, with `ddp`, `ddp_spawn`, `ddp2` and `zero1`.

    None uses torch's default: 25, after a first bucket of 1.
    """
    static_graph: bool = False
    """Assert that every step uses the same parameters in the same way; torch does not check this.

    With `ddp`, `ddp_spawn`, `ddp2` and `zero1`, buckets then follow the order in which gradients become
    ready.
    """
    find_unused_parameters: bool = False
    """Allow steps that do not use all parameters.

    `ddp`, `ddp_spawn`, `ddp2`, `zero1` and `horovod` then search for unused parameters in every step, which
    takes time. The other strategies need no search.
    """
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
    """Number format: `32`, `bf16-mixed`, `16-mixed` or `bf16-true`.

    The mixed formats compute the forward pass in bfloat16 or float16, with weights in float32. `bf16-true`
    uses bfloat16 for weights and all computations.
    """
    gradient_clip_norm: float | None = None
    """Maximum norm of all gradients; larger gradients are scaled down.

    The norm before clipping is logged as `grad_norm`.
    """
    gradient_clip_value: float | None = None
    """Maximum absolute value of each gradient element; larger values are clipped."""
    lr_reference_batch_size: int | None = None
    """Batch size that the learning rate was tuned for; the rate is scaled to `global_batch_size`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """`linear` scales the rate by the ratio of the batch sizes (for SGD), `sqrt` by its root (for Adam)."""
    warmup_steps: int = 0
    """Steps of the learning-rate warm-up: from the configured rate if it is scaled up, otherwise from 0."""
    recompute: Sequence[str] = ()
    """Submodules whose activations the backward pass recomputes.

    Names as in `named_modules`, such as `blocks.*`.
    """
    compile: bool | Mapping[str, Any] = False
    """Compile the module's steps with `torch.compile`. Pass a mapping to set its arguments."""
    checkpoint_every: int | Literal["auto"] | None = "auto"
    """Steps between checkpoints. In addition, a stop and the end of training always save.

    `auto` balances the cost of saving against the work that an interruption loses. None saves only at a stop
    and at the end.
    """
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
    """Fast folder on each node to which checkpoints are saved first; `auto` uses /dev/shm, otherwise TMPDIR.

    Checkpoints are then copied to the run folder in the background. None saves directly to the run folder.
    """
    on_bad_loss: Literal["stop", "skip", "rollback"] | None = "stop"
    """Reaction to a loss that is not finite, or is far above previous losses.

    `stop` ends the run as failed. `skip` skips the update of the step. `rollback` returns to the last
    good checkpoint and excludes the batch. None ignores the loss.
    """
    loss_spike_threshold: float | Literal["auto"] | None = "auto"
    """Distance from the median of the last losses above which a loss is bad, in robust standard deviations.

    None checks only whether losses are finite. `auto` is 20 for `skip` and `rollback`, and None for `stop`.
    """
    replica_check_every: int | None = 100
    """Number of steps in which the complete replicas of the ranks are compared once, one slice per step.

    Applies to `ddp`, `ddp_spawn`, `ddp2` and `zero1`. The complete state is also compared before each save.
    If a rank differs, the run restarts without the node of this rank. None disables the comparison.
    """
    memory_copies: bool | int = True
    """Copies of the state in the memory of the nodes, so that a failure repeats few steps.

    True copies the state as often as possible without spending more than 2% of the time on copies, if the
    memory suffices. A number limits the steps that a failure repeats. False makes no copies. See
    docs/restart.md.
    """
    validate_every: int | Literal["epoch"] | None = "epoch"
    """Steps between validations, or `epoch` for the end of each epoch. Training ends with a validation.

    None never validates.
    """
    sanity_val_batches: int = 1
    """Batches per rank to validate before the first step, to detect errors in the validation immediately."""
    callbacks: Sequence[Callback] = ()
    """Callbacks, such as `EarlyStopping`."""
    log_every: int = 1
    """Steps between lines in `metrics.jsonl`."""
    loggers: Sequence[str | Logger] = ()
    """Additional metric loggers: `csv`, `tensorboard`, `wandb`, `mlflow`, `neptune`, or your own.

    Neptune's hosted service was discontinued, so `neptune` is useful only offline.
    """
    elastic_determinism: bool = False
    """Make every bit of the result independent of the number of ranks; see docs/exactness.md."""
    grain_size: int | None = None
    """Samples of a batch that are computed together with `elastic_determinism`.

    The result depends on this number. None uses `micro_batch_size` if that is set, otherwise 1/24 of
    `global_batch_size`, but at least 4.
    """
    witness_every: int | None = None
    """Steps between comparisons of the same gradient from two ranks, to detect faulty devices.

    Requires `elastic_determinism`; see docs/exactness.md. None disables the comparison.
    """
    seed: int = 0
    """Seed of initial weights, data order and dropout."""
    hparams: Any = None
    """Hyper-parameters to record, in addition to the arguments of the script.

    A mapping, an argparse Namespace, a dataclass or a Hydra config.
    """
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
    """Seed the global random generators for each fetched sample.

    Random transforms then depend only on the seed, the epoch and the sample. Seeding takes a few microseconds
    per sample.
    """
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Function that combines samples into a batch. None uses torch's default."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UserError(
                f"max_steps is {self.max_steps!r} and max_epochs is {self.max_epochs!r}. Set exactly "
                "one of them."
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if name == "micro_batch_size" and value == "auto":
                continue
            if value is None and name not in _REQUIRED_COUNTS:
                continue
            if type(value) is not int or value < 1:
                other = " or 'auto'" if name == "micro_batch_size" else ""
                raise UserError(f"{name} is {value!r}, but must be an integer of at least 1{other}.")
        for name in ("gradient_clip_norm", "gradient_clip_value", "bucket_cap_mb", "dataloader_timeout_s"):
            value = getattr(self, name)
            if value is None and name != "dataloader_timeout_s":
                continue
            if not ((type(value) is int or isinstance(value, float)) and value > 0):
                raise UserError(f"{name} is {value!r}, but must be a number above 0.")
        if self.lr_scaling not in ("linear", "sqrt"):
            raise UserError(f"lr_scaling is {self.lr_scaling!r}, but must be 'linear' or 'sqrt'.")
        for name in ("warmup_steps", "sanity_val_batches", "num_workers"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise UserError(f"{name} is {value!r}, but must be an integer of at least 0.")
        if isinstance(self.recompute, str):
            self.recompute = (self.recompute,)
        if self.recompute and self.compile is not False:
            raise UserError(
                f"recompute is {self.recompute!r} and compile is {self.compile!r}, but torch.compile "
                "itself decides which activations to recompute. Set only one of them."
            )
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed!r}, but must be an integer that fits in 64 bits.")
        if not isinstance(self.compile, (bool, Mapping)):
            raise UserError(
                f"compile is {self.compile!r}, but must be True, False or a dict of torch.compile arguments."
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
        if type(self.keep_best) is not int or self.keep_best < 0:
            raise UserError(f"keep_best is {self.keep_best!r}, but must be an integer of at least 0.")
        if self.mode not in ("min", "max"):
            raise UserError(f"mode is {self.mode!r}, but must be 'min' or 'max'.")
        self._check_loss_guard()
        _check_every("checkpoint_every", self.checkpoint_every, "auto")
        _check_every("validate_every", self.validate_every, "epoch")
        if not isinstance(self.memory_copies, int) or self.memory_copies < 0:
            raise UserError(
                f"memory_copies is {self.memory_copies!r}, but must be True, False or the "
                "maximum number of steps to repeat after a failure (at least 1)."
            )
        self.loggers = find_loggers(self.loggers)
        try:
            self.hparams = plain_hparams(self.hparams or {})
        except TypeError as error:
            raise UserError(f"{error}.") from None
        if self.accelerator not in ("auto", "cpu", "gpu"):
            raise UserError(f"accelerator is {self.accelerator!r}, but must be 'auto', 'cpu' or 'gpu'.")
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
        if self.on_bad_loss not in ("stop", "skip", "rollback", None):
            raise UserError(
                f"on_bad_loss is {self.on_bad_loss!r}, but must be 'stop', 'skip', 'rollback' or None."
            )
        threshold = self.loss_spike_threshold
        if not (threshold in ("auto", None) or (type(threshold) in (int, float) and threshold > 0)):  # type: ignore[operator]
            raise UserError(
                f"loss_spike_threshold is {threshold!r}, but must be a number above 0, 'auto' or None."
            )
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


def _check_every(name: str, value: object, word: str) -> None:
    if value is None or value == word or (type(value) is int and value > 0):
        return
    raise UserError(f"{name} is {value!r}, but must be a number of steps (at least 1), {word!r} or None.")
