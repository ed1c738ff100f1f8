"""Provide logging, data loaders and `trainer` to a module while it is trained or evaluated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.rundir import find_output
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import suggest
from hpctrain.training.base.metric_accumulator import SKIPPED_FIELD, TOKENS_FIELD
from hpctrain.training.callbacks import Callback
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import StepSource
from hpctrain.training.module import Module
from hpctrain.training.training_state import TrainingState

#: Names of hooks in any version of Lightning.
HOOK = re.compile(
    r"on_\w+_(start|end|eval|train|save|load)|on_(before|after)_\w+|on_exception|backward|setup|teardown"
    r"|(training|validation|test)(_epoch)?_end|optimizer_(step|zero_grad)|lr_scheduler_step|prepare_data"
    r"|configure_(apex|callbacks|ddp|gradient_clipping|model|sharded_model|sync_batchnorm)"
    r"|transfer_batch_to_device|init_ddp_connection|tbptt_split_batch"
)
#: Replacements for hooks that hpctrain does not call.
REPLACEMENTS = {
    "backward": "manual optimization",
    "configure_callbacks": "the Trainer setting callbacks",
    "configure_gradient_clipping": "the Trainer setting gradient_clip_norm or gradient_clip_value",
    "configure_ddp": "the Trainer settings find_unused_parameters, static_graph and bucket_cap_mb",
    "init_ddp_connection": "`hpctrain submit`, torchrun or srun, whose variables hpctrain detects",
    "optimizer_zero_grad": "no method: hpctrain sets gradients to None after each update",
    "optimizer_step": "the Trainer setting warmup_steps, a scheduler, or manual optimization",
}
#: Names of arguments in the methods of Lightning's Trainer.
_ARGUMENTS = {
    "dataloaders": "dataset",
    "model": "module",
    **dict.fromkeys(("train_dataloader", "train_dataloaders"), "train_dataset"),
    "val_dataloaders": "val_dataset",
}
#: Arguments of Lightning's `log`, besides the name, the value and `prog_bar`.
_LOG_OPTIONS = {
    *("logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group"),
    *("add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only"),
}


def lightning_base(value: Any, *names: str) -> type | None:
    """Return the class of Lightning that `value` extends, or None, without importing Lightning."""
    for kind in type(value).__mro__:
        package = kind.__module__.split(".")[0]
        if kind.__name__ in (names or ("LightningModule",)) and package in ("lightning", "pytorch_lightning"):
            return kind
    return None


def overrides(host: Any, method: str) -> bool:
    """Return true if the user's class overrides a method of Lightning's classes or of `Module`."""
    base = lightning_base(host, "LightningModule", "LightningDataModule") or Module
    return getattr(type(host), method, None) is not getattr(base, method, None)


def canonical_arguments(
    method: str, arguments: Mapping[str, Any], lightning: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of a method of the Trainer, of which some have Lightning's names."""
    result = dict(arguments)
    for name, value in lightning.items():
        argument = _ARGUMENTS.get(name, name)
        if name in ("weights_only", "verbose", "return_predictions"):
            continue  # without effect on the result
        if name == "ckpt_path":
            if value is not None and (value != "last" or method != "fit"):
                remedy = "hpctrain uses the weights of the module"
                if method == "fit":
                    remedy = "A run resumes from its newest checkpoint"
                raise UserError(f"{method}(ckpt_path={value!r}): ckpt_path is not supported. {remedy}.")
        elif argument not in result:
            raise UserError(f"{method}() has no argument {name!r}. {suggest(name, result)}")
        elif result[argument] is not None and value is not None:
            raise UserError(f"{method}() received both {argument} and {name}. Pass only one of them.")
        elif value is not None:
            result[argument] = value
    data = "train_dataset" if method == "fit" else "dataset"
    if lightning_base(result[data], "LightningDataModule") is not None:
        result |= {data: None, "datamodule": result[data]}
    return result


def refuse_hooks(
    host: Any, hooks: Iterable[str], stage: str, replacements: Mapping[str, str], alternative: str
) -> None:
    refused = [hook for hook in hooks if stage == "predict" or not hook.startswith("on_predict_")]
    if refused:
        remedies = [
            f"Instead of {hook}, use {replacements[hook]}." for hook in refused if hook in replacements
        ]
        raise UserError(
            f"{type(host).__name__} overrides {', '.join(refused)}, which hpctrain.Trainer does not call. "
            f"{' '.join(remedies) or f'Rename or remove it, or use {alternative}.'}"
        )


class _Provided:
    """Object with some attributes of one of Lightning's; the use of others is refused by name."""

    def __init__(self, path: str, **attributes: Any) -> None:
        vars(self).update(attributes, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = "See docs/frameworks.md for the supported attributes"
        if name in ("logger", "loggers"):
            remedy = "Log metrics with self.log, and select loggers with Trainer(loggers=…)"
        raise UserError(f"hpctrain does not provide {self._path}.{name}. {remedy}.")


class TrainerProxy(_Provided):
    def __init__(self, run: ModuleRun, trainer: Any, context: DistributedContext, datamodule: Any) -> None:
        ranks = context.ranks
        run_dir = find_output(trainer.run_dir, os.environ)
        folder = os.getcwd() if run_dir is None else str(run_dir.path)
        super().__init__(
            "self.trainer",
            global_rank=ranks.rank,
            num_devices=ranks.local_world_size,
            **{name: getattr(ranks, name) for name in ("local_rank", "node_rank", "world_size", "num_nodes")},
            is_global_zero=ranks.is_main,
            max_epochs=trainer.max_epochs,
            max_steps=trainer.max_steps or -1,
            default_root_dir=folder,
            log_dir=folder,
            datamodule=datamodule,
            strategy=_Provided(
                "self.trainer.strategy",
                barrier=lambda _name=None: context.barrier(),
                root_device=context.device,
            ),
        )
        self._run, self._trainer = run, trainer
        self.current_epoch = self.global_step = 0
        self.training = self.validating = self.sanity_checking = False
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def is_last_batch(self) -> bool:
        source = self._run.source
        if source is None or source.exchanges_ends:
            raise UserError(
                "self.trainer.is_last_batch is unknown. It requires training on a map-style data set, "
                "because a stream has no length."
            )
        return source.at_epoch_end

    @property
    def should_stop(self) -> bool:
        return self._trainer.ending is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value:
            self._trainer.end("the module set trainer.should_stop")

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        """Results of the latest validation, or of the evaluation that is ending."""
        validation = {} if self._run.state is None else self._run.state.validation
        return {name: torch.tensor(mean) for name, mean in {**validation, **self._run.results}.items()}

    @property
    def estimated_stepping_batches(self) -> float:
        last_step = None if self._run.source is None else self._run.source.last_step
        return float("inf") if last_step is None else last_step


class ModuleRun:
    """Training or evaluation of a module: "fit", "validate", "test" or "predict", within a block."""

    #: Subclass of `TrainStep` for the module, if it needs one.
    step_class: ClassVar[Any] = None

    def __init__(
        self, trainer: Any, module: Any, context: DistributedContext, datamodule: Any, stage: str
    ) -> None:
        self._module, self._datamodule, self._context, self._stage = module, datamodule, context, stage
        self._check_hooks()
        self.validates = overrides(module, "validation_step") and trainer.validate_every is not None
        #: Type `Any`, because attributes of the proxy are set dynamically.
        self.proxy: Any = TrainerProxy(self, trainer, context, datamodule)
        self.callbacks: list[Callback] = []
        #: None in an evaluation, like `state`.
        self.source: StepSource | None = None
        self.state: TrainingState | None = None
        #: Metrics of an evaluation, while its last hooks run.
        self.results: dict[str, float] = {}
        self._logged: dict[str, Any] | None = None
        #: Samples in the current batch; 0 for a spare batch, None if unknown.
        self._num_samples: int | None = None
        #: Batch sizes of the DataLoaders; scripts pass them to `self.log` even for smaller batches.
        self._batch_sizes: set[int | None] = set()
        #: Paths of the torchmetrics metrics that were logged.
        self._metrics: dict[str, str] = {}
        self._is_in_batch = self._has_hinted = False

    def __enter__(self) -> Self:
        self._module._hpctrain = self
        return self

    def __exit__(self, _error: type[BaseException] | None, *_: object) -> None:
        del self._module._hpctrain

    def __deepcopy__(self, _memo: dict[int, Any]) -> ModuleRun:
        return self  # a copy of the module belongs to the same training

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a pickled module belongs to no training

    def _check_hooks(self) -> None:
        module = self._module
        if self._datamodule is not None:
            raise UserError(
                f"A datamodule requires a LightningModule, but the module is of type "
                f"{type(module).__name__}. Pass data sets instead."
            )
        if isinstance(module, Module):
            hooks = [name for name in dir(type(module)) if HOOK.fullmatch(name) and not hasattr(Module, name)]
            refuse_hooks(module, hooks, self._stage, REPLACEMENTS, "a callback or a LightningModule")

    def find_data(self, data: Any, name: str) -> Any:
        host, method = self._datamodule or self._module, f"{name.removesuffix('idate')}_dataloader"
        if data is None and (overrides(host, method) or method in vars(host)):
            data = getattr(host, method)() if name != "val" or self.validates else None
        loaders = list(data.values()) if isinstance(data, Mapping) else data
        if isinstance(loaders, (list, tuple)) and all(hasattr(loader, "dataset") for loader in loaders):
            if len(loaders) > 1:
                raise UserError(
                    f"The {name} data has {len(loaders)} DataLoaders. Pass one DataLoader, or return "
                    f"one from {method}()."
                )
            data = loaders[0] if loaders else None
        self.validates = self.validates and (name != "val" or data is not None)
        self._batch_sizes.add(getattr(data, "batch_size", None))
        return data

    @contextmanager
    def logging(self, num_samples: int | None = None, *, in_batch: bool = False) -> Iterator[dict[str, Any]]:
        """Collect the values that `self.log` receives within the block, for this number of samples."""
        before = self._logged, self._num_samples, self._is_in_batch
        logged: dict[str, Any] = {}
        self._logged, self._num_samples = logged, num_samples
        self._is_in_batch = in_batch or num_samples is not None
        try:
            yield logged
        finally:
            self._logged, self._num_samples, self._is_in_batch = before

    def log_values(self, values: Mapping[str, torch.Tensor]) -> None:
        assert self._logged is not None
        self._logged |= values

    def log(self, module: nn.Module, name: str, value: Any, options: Mapping[str, Any]) -> None:
        is_metric, reduce_fx = isinstance(value, nn.Module), options.get("reduce_fx", "mean")
        size = options.get("batch_size")
        paths = [path for path, layer in self._module.named_modules() if layer is value] if is_metric else []
        problem = None
        if self._logged is None:
            problem = "was called in a hook that cannot log metrics. Call it in a batch or epoch hook"
        elif name in (TOKENS_FIELD, SKIPPED_FIELD):
            problem = "uses a reserved name. Choose another name"
        elif unknown := options.keys() - _LOG_OPTIONS:
            problem = f"has no argument {min(unknown)!r}"
        elif reduce_fx not in ("mean", torch.mean):
            problem = f"has reduce_fx={reduce_fx!r}, but hpctrain logs only means"
        elif options.get("rank_zero_only"):
            problem = "has rank_zero_only=True, but hpctrain always logs the mean over all ranks"
        elif self._num_samples and size not in (None, self._num_samples, *self._batch_sizes):
            problem = (
                f"has batch_size={size}, but the mean is weighted by the {self._num_samples} samples of "
                "the batch. Log a mean over the samples, and remove batch_size"
            )
        elif is_metric and module is not self._module:
            problem = "received a metric, whose state strategy 'dp' would lose. Log a tensor, or use 'ddp'"
        elif is_metric and not paths:
            problem = "received a metric that is not an attribute of the module. Assign it in __init__"
        elif is_metric and self.proxy.training and value._forward_cache is None:
            call = f"self.{paths[0]}"
            problem = f"needs the metric's value for this step. Call {call}(…), not {call}.update(…)"
        if problem or self._logged is None:
            raise UserError(f"{type(self._module).__name__}.log({name!r}, …) {problem}.")
        self._note_options_without_effect(name, options)
        if is_metric:
            self._metrics[name] = paths[0]
            if not self.proxy.training:
                return  # computed at the end
            value = value._forward_cache
        self._logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def _note_options_without_effect(self, name: str, options: Mapping[str, Any]) -> None:
        is_training = self.proxy.training
        ignored = {"on_step": not is_training, "on_epoch": is_training} if self._is_in_batch else {}
        ignored["logger"] = False
        unused = [f"{option}={value}" for option, value in ignored.items() if options.get(option) is value]
        if unused and self._context.ranks.is_main and not self._has_hinted:
            self._has_hinted = True
            print(
                f"hpctrain: {type(self._module).__name__}.log({name!r}, {', '.join(unused)}): hpctrain "
                "records each value once per training step, and its mean once per validation or test. The "
                "mean of an epoch is the mean of its steps.",
                flush=True,
            )

    def begin_step(self, rank_batch: RankBatch) -> None:
        proxy = self.proxy
        proxy.training, proxy.current_epoch, proxy.global_step = True, rank_batch.epoch, rank_batch.step - 1

    def begin_evaluation(self, kind: str, *, is_sanity: bool) -> None:
        self.proxy.training, self.proxy.validating = False, kind == "validation"
        self.proxy.sanity_checking = is_sanity
        self.reset_metrics()

    def end_evaluation(self, kind: str, means: Mapping[str, float], num_samples: float) -> dict[str, float]:
        """Collective. Return all metrics of an evaluation of `num_samples` samples on this rank."""
        del kind, num_samples
        results = {**means, **self.compute_metrics()}
        self.reset_metrics()
        self.proxy.validating = self.proxy.sanity_checking = False
        return results

    def reset_metrics(self) -> None:
        for path in self._metrics.values():
            self._module.get_submodule(path).reset()
        self._metrics = {}

    def compute_metrics(self) -> dict[str, float]:
        # A rank without samples has logged no metric, but must take part in its exchange.
        for paths in self._context.all_gather(self._metrics):
            self._metrics.update(paths)
        metrics = sorted(self._metrics.items())
        return {name: float(self._module.get_submodule(path).compute()) for name, path in metrics}
