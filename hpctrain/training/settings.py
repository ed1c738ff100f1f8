"""What a user may set about training, checked as soon as it is set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, Self

import torch

from hpctrain.checkpoint.retention import Retention
from hpctrain.errors import UserError
from hpctrain.telemetry.loggers import Logger, find_loggers
from hpctrain.training.algorithms import Algorithm, find_algorithm
from hpctrain.training.algorithms.base import AllReduce
from hpctrain.training.callbacks import Callback
from hpctrain.training.devices import Devices, parse_devices
from hpctrain.training.precision import check_precision
from hpctrain.training.strategies import find_strategy
from hpctrain.training.strategies.registry import chosen_name

#: A folder in the memory of a node, on Linux.
_SHARED_MEMORY = Path("/dev/shm")

#: Settings that are whole numbers of at least 1; all but `global_batch_size` may be None.
_COUNTS = (
    "max_steps",
    "max_epochs",
    "global_batch_size",
    "lr_batch_size",
    "micro_batch_size",
    "keep_checkpoints",
    "keep_every",
    "log_every",
    "prefetch_factor",
)


@dataclass(kw_only=True)
class Settings:
    """The settings of a `Trainer`.

    Raises:
        UserError: a setting is out of its range or unknown, or neither or both of `max_steps` and
            `max_epochs` are given.
    """

    max_steps: int | None = None
    """Optimizer steps after which training ends."""
    max_epochs: int | None = None
    """Passes over the training set after which training ends; instead of `max_steps`."""
    global_batch_size: int = 32
    """Samples in an optimizer step, on all ranks together; the same on any number of ranks."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Samples that a rank computes with at once, at the most; it adds up gradients over its share of a batch.
    `auto` finds out what fits into the GPU's memory; None takes the whole share. The gradient is the same."""
    strategy: str = "auto"
    """How ranks share the work, by name: docs/strategies.md lists them. `auto` is what the job asks for, or
    else `ddp`."""
    algorithm: str | Algorithm = "allreduce"
    """How the ranks of `ddp` agree: `allreduce`, `fp16`, `bf16`, `powersgd`, `bytegrad`, `qadam`,
    `decentralized`, `low_precision_decentralized`, `async`, `local_sgd`; one with arguments; or your own."""
    bucket_mb: float | None = None
    """Size of the parts, in megabytes, in which gradients are sent while the backward pass goes on, with
    `ddp`, `ddp_spawn`, `ddp2` and `zero1`; None is torch's own choice, 25 after a first one of 1."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same way: with the same strategies, all is
    then sent in the order in which gradients get ready. torch does not look whether it is kept."""
    find_unused_parameters: bool = False
    """Allow steps in which some parameters have no part: `ddp`, `ddp_spawn`, `ddp2`, `zero1` and `horovod`
    look for them in every step then, which takes time. The other strategies need not look."""
    devices: Devices | None = None
    """Where to train if nobody has started ranks: a number of devices, -1 for all, indices such as `[1, 3]`
    or `"1,3"`, or `auto` for all that are free. More than one starts a process for each, except with `dp`.
    None is one device, and `auto` with `ddp_spawn` and `dp`. What Slurm or another launcher gave, stays."""
    precision: str = "32"
    """`32`; `bf16-mixed` or `16-mixed`: forward pass in bfloat16 or float16, weights in float32; `bf16-true`:
    weights and all else in bfloat16."""
    gradient_clip_norm: float | None = None
    """Gradients whose norm over all parameters is larger are scaled down to it, as `grad_norm` then tells."""
    gradient_clip_value: float | None = None
    """Each element of a gradient is cut to between minus this and this."""
    lr_batch_size: int | None = None
    """The batch size that the learning rate was found for: it is scaled to `global_batch_size`."""
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    """Scale it by the ratio of the batch sizes, as fits SGD, or by its square root, as fits Adam."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises: from what was set if it is scaled up, else from 0."""
    recompute: Sequence[str] = ()
    """Submodules whose results are not kept for the backward pass, which computes them again: names as in
    `named_modules`, such as `blocks.*`."""
    compile: bool | Mapping[str, Any] = False
    """Translate the module's steps with `torch.compile`; a mapping gives its arguments."""
    checkpoint_every: int | Literal["auto"] | None = "auto"
    """Save after every so many steps; `auto` balances the time that saving takes against the work that an
    interruption costs. A stop and the end of training save in any case."""
    checkpoint_async: bool = True
    """Train on while a checkpoint is written; only copying the state holds the training up."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep those, too, whose step is a multiple of this."""
    keep_best: int = 0
    """Keep so many, too, that are the best by `best_metric`; what was validated is saved then."""
    best_metric: str = "val_loss"
    """What `keep_best` goes by: a name that `validation_step` or `training_step` returns."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a low `best_metric` is better, or a high one."""
    local_checkpoints: str | os.PathLike[str] | None = None
    """A fast folder of each node to save into first, which is copied to the run folder in the background;
    `auto` takes /dev/shm, or else TMPDIR."""
    validate_every: int | Literal["epoch"] | None = "epoch"
    """Validate after every so many steps, or at the end of each epoch; and at the end of training."""
    sanity_batches: int = 1
    """Batches that each rank validates before the first step, so that a mistake in it shows at once."""
    callbacks: Sequence[Callback] = ()
    """What is called at moments of the training, such as `EarlyStopping`."""
    log_every: int = 1
    """Write every so many steps to `metrics.jsonl`."""
    loggers: Sequence[str | Logger] = ()
    """Where metrics go besides: `csv`, `tensorboard`, `wandb`, `mlflow`, `neptune`, or one of your own."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""
    record_samples: bool = False
    """Write the indices of all trained samples to `samples/`."""
    run_dir: str | os.PathLike[str] | None = None
    """Where to write; the run's own folder by default. Without either nothing is written."""
    num_workers: int = 0
    """Processes that load data for each rank; 0 loads in the rank itself."""
    prefetch_factor: int = 2
    """Batches that each of these processes may have ready."""
    data_timeout_s: float = 900.0
    """How long to wait for a batch from these processes, in seconds."""
    seed_samples: bool = True
    """Seed the global random generators for each sample that a data set fetches, so that what it draws from
    them depends on the sample alone. It takes some microseconds a sample."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch out of samples; torch's default otherwise."""

    def __new__(cls, *args: object, **given: object) -> Self:  # noqa: ARG004
        """See to it that there are such settings, and name the one that may have been meant."""
        known = [its.name for its in fields(cls)]
        for name in given:
            if name not in known:
                close = get_close_matches(name, known, 1)
                hint = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}."
                raise UserError(f"{cls.__name__} has no setting {name!r}. {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UserError(
                f"max_steps is {self.max_steps!r} and max_epochs is {self.max_epochs!r}; give one of the two."
            )
        for name in _COUNTS:
            value = getattr(self, name)
            if name == "micro_batch_size" and value == "auto":
                continue
            if value is None and name != "global_batch_size":
                continue
            if not isinstance(value, int) or value is True or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        for name in ("gradient_clip_norm", "gradient_clip_value", "bucket_mb"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise UserError(f"{name} is {value!r}; it must be a number above 0, or None.")
        if self.lr_scaling not in ("linear", "sqrt"):
            raise UserError(f"lr_scaling is {self.lr_scaling!r}; give 'linear' or 'sqrt'.")
        for name in ("warmup_steps", "sanity_batches", "num_workers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least 0.")
        if isinstance(self.recompute, str):
            self.recompute = (self.recompute,)
        if self.recompute and self.compile is not False:
            raise UserError(
                f"recompute is {self.recompute!r} and compile is {self.compile!r}: torch.compile decides by "
                "itself what is computed again in the backward pass. Give one of the two."
            )
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed!r}; it must be a whole number of at most 63 bits.")
        if not isinstance(self.compile, (bool, Mapping)):
            raise UserError(
                f"compile is {self.compile!r}; give True, or a dict of torch.compile's arguments."
            )
        if isinstance(self.compile, Mapping):
            _check_arguments("compile", self.compile, torch.compile)
        if isinstance(self.callbacks, Callback):
            self.callbacks = (self.callbacks,)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise UserError(f"callbacks has {callback!r}, which is no hpctrain.Callback.")
        if not self.data_timeout_s > 0:
            raise UserError(f"data_timeout_s is {self.data_timeout_s}; it must be more than 0.")
        if not isinstance(self.keep_best, int) or self.keep_best < 0:
            raise UserError(f"keep_best is {self.keep_best!r}; it must be a whole number of at least 0.")
        if self.best_mode not in ("min", "max"):
            raise UserError(f"best_mode is {self.best_mode!r}; give 'min' or 'max'.")
        _check_every("checkpoint_every", self.checkpoint_every, "auto")
        _check_every("validate_every", self.validate_every, "epoch")
        self.loggers = find_loggers(self.loggers)
        if self.strategy == "auto":
            find_strategy(self.strategy, os.environ)
            self.strategy = chosen_name(os.environ)
        if self.devices is not None:
            parse_devices(self.devices)
        check_precision(self.precision)
        strategy = find_strategy(self.strategy, os.environ)
        strategy.check(self)
        if self.bucket_mb is not None and not strategy.has_buckets:
            raise UserError(
                f"bucket_mb is {self.bucket_mb!r}, which is for strategies 'ddp', 'ddp_spawn', 'ddp2' and "
                f"'zero1', but strategy is {self.strategy!r}: it sends gradients in its own way."
            )
        if self.static_graph and (not strategy.has_buckets or self.find_unused_parameters):
            raise UserError(
                f"static_graph is True, strategy is {self.strategy!r} and find_unused_parameters is "
                f"{self.find_unused_parameters}: it is for 'ddp', 'ddp_spawn', 'ddp2' and 'zero1', where no "
                "step leaves parameters out."
            )
        algorithm = find_algorithm(self.algorithm)
        if type(algorithm) is not AllReduce and not strategy.has_algorithms:
            raise UserError(
                f"algorithm is {self.algorithm!r}, which is for strategies 'ddp' and 'ddp_spawn', but "
                f"strategy is {self.strategy!r}: it has its own way to bring gradients together."
            )
        algorithm.check(self)

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return Retention(
            last=self.keep_checkpoints,
            every=self.keep_every,
            best=self.keep_best,
            best_mode=self.best_mode,
        )

    def second_tier(self, environ: Mapping[str, str]) -> Path | None:
        """The fast folder that `local_checkpoints` asks for; None where it asks for none."""
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
                f"{name} has {argument!r}, which torch.{of.__name__} does not take: {', '.join(known)}."
            )


def _check_every(name: str, value: object, word: str) -> None:
    if value is None or value == word or (isinstance(value, int) and value is not True and value > 0):
        return
    raise UserError(f"{name} is {value!r}; give a number of steps of at least 1, {word!r} or None.")
