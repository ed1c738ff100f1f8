"""Use a LightningModule or -DataModule in the Trainer, and provide a module's logging and `trainer`."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.rundir import output_folder
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.metric_accumulator import SKIPPED_FIELD, TOKENS_FIELD
from hpctrain.training.callbacks import Callback
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import StepSource
from hpctrain.training.module import Module, is_manual
from hpctrain.training.optim.optimizer_setup import parameters_of
from hpctrain.training.optim.resumed_values import advance_period
from hpctrain.training.training_state import TrainingState

_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: Names of hooks in any version of Lightning.
_HOOK = re.compile(
    r"on_\w+_(start|end|eval|train|save|load)|on_(before|after)_\w+|on_exception|backward|setup|teardown"
    r"|(training|validation|test)(_epoch)?_end|optimizer_(step|zero_grad)|lr_scheduler_step|prepare_data"
    r"|configure_(apex|callbacks|ddp|gradient_clipping|model|sharded_model|sync_batchnorm)"
    r"|transfer_batch_to_device|init_ddp_connection|tbptt_split_batch"
)
#: Methods of Lightning that a user's class may override.
_SUPPORTED = {
    *(*_LOADERS, *_STEPS, "load_from_checkpoint", "to_onnx", "to_torchscript", "to_tensorrt"),
    *("prepare_data", "setup", "teardown", "configure_model", "configure_optimizers", "lr_scheduler_step"),
    *("state_dict", "load_state_dict", "on_save_checkpoint", "on_load_checkpoint", "on_fit_start"),
    *("on_fit_end", "on_after_backward", "on_before_optimizer_step", "on_after_batch_transfer"),
    *(
        f"on_{stage}{unit}_{end}"
        for stage in ("train", "validation", "test")
        for unit in ("", "_epoch", "_batch")
        for end in ("start", "end")
    ),
}
#: Replacements for hooks that hpctrain does not call.
_REPLACEMENTS = {
    "backward": "manual optimization",
    "configure_callbacks": "the Trainer setting callbacks",
    "configure_gradient_clipping": "the Trainer setting gradient_clip_norm or gradient_clip_value",
    "configure_ddp": "the Trainer settings find_unused_parameters, static_graph and bucket_cap_mb",
    "configure_sharded_model": "configure_model",
    "init_ddp_connection": "`hpctrain submit`, torchrun or srun, whose variables hpctrain detects",
    "on_before_batch_transfer": "on_after_batch_transfer",
    "on_before_zero_grad": "on_train_batch_end",
    "optimizer_zero_grad": "no method: hpctrain sets gradients to None after each update",
    "optimizer_step": "the Trainer setting warmup_steps, a scheduler, or manual optimization",
    "test_epoch_end": "on_test_epoch_end",
    "training_epoch_end": "on_train_epoch_end",
    "transfer_batch_to_device": "on_after_batch_transfer or collate_fn",
    "validation_epoch_end": "on_validation_epoch_end",
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


def _check_hooks(host: Any, stage: str) -> None:
    name, base = type(host).__name__, lightning_base(host, "LightningModule", "LightningDataModule")
    called = {*dir(Module)} if base is None else {*dir(nn.Module), *_SUPPORTED}
    refused = [
        hook
        for hook in dir(type(host))
        if (_HOOK.fullmatch(hook) or (hook[0] != "_" and inspect.isfunction(getattr(base, hook, None))))
        and hook not in called
        and overrides(host, hook)
        and (stage == "predict" or not hook.startswith("on_predict_"))
    ]
    if refused:
        remedies = [
            f"Instead of {hook}, use {_REPLACEMENTS[hook]}."
            for hook in refused
            # The replacement may be a hook of LightningModules only.
            if hook in _REPLACEMENTS and (base or not _HOOK.fullmatch(_REPLACEMENTS[hook].split()[0]))
        ]
        alternative = "hpctrain.lightning.Trainer" if base else "a callback or a LightningModule"
        raise UserError(
            f"{name} overrides {', '.join(refused)}, which hpctrain.Trainer does not call. "
            f"{' '.join(remedies) or f'Rename or remove it, or use {alternative}.'}"
        )
    for step in _STEPS if base else ():
        parameters = inspect.signature(getattr(host, step, _check_hooks)).parameters
        if unknown := parameters.keys() & {"dataloader_iter", "optimizer_idx", "hiddens"}:
            raise UserError(
                f"{name}.{step} has the parameter {min(unknown)}, which hpctrain does not pass. Remove the "
                "parameter."
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
        folder = output_folder(trainer.run_dir, os.environ) or os.getcwd()
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
                backward=lambda loss, _optimizer, *args, **options: run.backward(loss, *args, **options),
            ),
            # LightningModule's own methods use these.
            progress_bar_callback=None,
            gradient_clip_val=None,
            gradient_clip_algorithm=None,
            precision_plugin=SimpleNamespace(clip_gradients=_clip_gradients),
        )
        self._run, self._trainer = run, trainer
        self.current_epoch = self.global_step = 0
        self.training = self.validating = self.sanity_checking = False
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_scheduler_configs: list[SimpleNamespace] = []

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
    """Training or evaluation of a module; only the hooks of a LightningModule are called."""

    def __init__(self, trainer: Any, module: Any, context: DistributedContext, datamodule: Any) -> None:
        self._module, self._datamodule, self._context = module, datamodule, context
        self.has_hooks = lightning_base(module) is not None
        self.validates = overrides(module, "validation_step") and trainer.validate_every is not None
        self.proxy = TrainerProxy(self, trainer, context, datamodule)
        #: None in an evaluation, like `state`.
        self.source: StepSource | None = None
        self.state: TrainingState | None = None
        #: Schedules that hpctrain advances.
        self.schedules: list[LightningSchedule] = []
        #: Samples in the current batch; 0 for a spare batch, None if unknown.
        self.num_samples: int | None = None
        self.batch_idx = 0
        #: Output and batch of the last training step, for `on_train_batch_end`.
        self.step_end: tuple[Mapping[str, Any], Any] = ({}, None)
        #: Metrics of an evaluation, while its last hooks run.
        self.results: dict[str, float] = {}
        #: Implementation of `manual_backward`.
        self.backward: Callable[..., None]
        self._logged: dict[str, Any] | None = None
        self._batch: tuple[Any, int] = (None, 0)
        #: Batch sizes of the DataLoaders; scripts pass them to `self.log` even for smaller batches.
        self._batch_sizes: set[int | None] = set()
        #: Paths of the torchmetrics metrics that were logged.
        self._metrics: dict[str, str] = {}
        self._has_started = self._is_in_step = self._is_in_batch = self._has_hinted = False

    def __deepcopy__(self, _memo: dict[int, Any]) -> ModuleRun:
        return self  # a copy of the module belongs to the same training

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a pickled module belongs to no training

    def start_fit(self) -> None:
        """Call `on_fit_start` once, before the first validation."""
        if self.has_hooks and not self._has_started and self.state is not None:
            self._has_started = True
            self.proxy.global_step, self.proxy.current_epoch = self.state.step, self.state.epoch
            self._module.on_fit_start()

    def find_data(self, data: Any, name: str) -> Any:
        host, method = self._datamodule or self._module, f"{name.removesuffix('idate')}_dataloader"
        if name == "val" and not self.validates and (self.has_hooks or data is None):
            return None
        if data is None and (overrides(host, method) or method in vars(host)):
            data = getattr(host, method)()
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
        before = self._logged, self.num_samples, self._is_in_batch
        logged: dict[str, Any] = {}
        self._logged, self.num_samples = logged, num_samples
        self._is_in_batch = in_batch or num_samples is not None
        try:
            yield logged
        finally:
            self._logged, self.num_samples, self._is_in_batch = before

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
        elif self.num_samples and size not in (None, self.num_samples, *self._batch_sizes):
            problem = (
                f"has batch_size={size}, but the mean is weighted by the {self.num_samples} samples of "
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
        self._hint_at_options(name, options)
        if is_metric:
            self._metrics[name] = paths[0]
            if not self.proxy.training:
                return  # computed at the end
            value = value._forward_cache
        self._logged[name] = value.detach() if isinstance(value, torch.Tensor) else value

    def _hint_at_options(self, name: str, options: Mapping[str, Any]) -> None:
        is_training = self.proxy.training
        ignored = {"on_step": not is_training, "on_epoch": is_training} if self._is_in_batch else {}
        ignored["logger"] = False
        given = [f"{option}={value}" for option, value in ignored.items() if options.get(option) is value]
        if given and self._context.ranks.is_main and not self._has_hinted:
            self._has_hinted = True
            print(
                f"hpctrain: {type(self._module).__name__}.log({name!r}, {', '.join(given)}): hpctrain "
                "records each value once per training step, and its mean once per validation or test. The "
                "mean of an epoch is the mean of its steps.",
                flush=True,
            )

    def begin_step(self, rank_batch: RankBatch) -> None:
        proxy, self.batch_idx = self.proxy, rank_batch.batch_idx
        proxy.training, proxy.current_epoch, proxy.global_step = True, rank_batch.epoch, rank_batch.step - 1

    def run_step(self, module: Any, kind: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a step of a LightningModule, or of its copy on a device, with the hooks of the batch."""
        users: Any = super(LightningSteps, module)
        step = getattr(users, f"{kind}_step")
        if self._is_in_step:  # the user's class calls the step
            return step(*arguments, **named)
        transfer, hook = "on_after_batch_transfer", f"on_{kind.removesuffix('ing')}_batch_start"
        host = self._datamodule if overrides(self._datamodule, transfer) else module
        batch, batch_idx = getattr(host, transfer)(arguments[0], 0), arguments[1]
        if module is self._module:
            self._batch = batch, batch_idx
            if getattr(users, hook)(batch, batch_idx) == -1:
                raise UserError(
                    f"{type(module).__name__}.{hook} returned -1, which hpctrain does not support. To end "
                    "training, set self.trainer.should_stop = True."
                )
        self._is_in_step = True
        try:
            kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
            takes_one = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == 1
            return step(batch) if takes_one else step(batch, batch_idx)
        finally:
            self._is_in_step = False

    def end_step(self, module: Any, kind: str, outputs: Any) -> Any:
        """Return the result of the user's `_end` method, if there is one; of a training step only the loss.

        `outputs` are those of `run_step` on all devices.
        """
        users: Any = super(LightningSteps, module)
        end = getattr(users, f"{kind}_step_end", None)
        outputs = outputs if end is None else end(outputs)
        if self._is_in_step:
            return outputs
        if kind != "training":
            getattr(users, f"on_{kind}_batch_end")(outputs, *self._batch)
            return outputs
        outputs = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        loss = outputs.get("loss")
        if loss is None and not is_manual(module):
            raise UserError(
                f"{type(module).__name__}.training_step returned no loss. Return a loss for every batch."
            )
        self.step_end = ({} if loss is None else {**outputs, "loss": loss.detach()}, self._batch[0])
        return {} if loss is None else {"loss": loss}

    def reset_metrics(self) -> None:
        for path in self._metrics.values():
            self._module.get_submodule(path).reset()
        self._metrics = {}

    def begin_evaluation(self, method: str, *, is_sanity: bool) -> None:
        self.start_fit()
        kind = method.removesuffix("_step")
        self.proxy.training, self.proxy.validating = False, kind == "validation"
        self.proxy.sanity_checking = is_sanity
        if self.has_hooks:
            self.reset_metrics()
            getattr(self._module, f"on_{kind}_start")()
            getattr(self._module, f"on_{kind}_epoch_start")()

    def end_evaluation(self, method: str, means: Mapping[str, float], count: int) -> dict[str, float]:
        """Call the hooks after a validation or test of `count` samples on this rank; return all metrics."""
        results = {**means}
        if self.has_hooks:
            hook = f"on_{method.removesuffix('_step')}"
            self.results = {**means, **self._compute_metrics()}
            with self.logging() as logged:
                getattr(self._module, f"{hook}_epoch_end")()
            results |= self._compute_metrics()  # the hook may log more
            self.reset_metrics()
            self.results = results = {**results, **self._average_logged(f"{hook}_epoch_end", logged, count)}
            getattr(self._module, f"{hook}_end")()
        self.proxy.validating = self.proxy.sanity_checking = False
        self.results = {}
        return results

    def _average_logged(self, hook: str, logged: Mapping[str, Any], count: int) -> dict[str, float]:
        """Return the means over all ranks of the values that a hook has logged, weighted by `count`."""
        values = {name: float(logged[name]) for name in logged}
        gathered = self._context.all_gather((count, values))
        names = gathered[0][1].keys()
        for rank, (_, rank_values) in enumerate(gathered):
            if rank_values.keys() != names:
                raise UserError(
                    f"{type(self._module).__name__}.{hook} logs {sorted(names)} on rank 0, but "
                    f"{sorted(rank_values)} on rank {rank}. Log the same names on every rank."
                )
        return {name: _mean([(weight, values[name]) for weight, values in gathered]) for name in names}

    def _compute_metrics(self) -> dict[str, float]:
        # A rank without samples has logged no metric, but must take part in its exchange.
        for paths in self._context.all_gather(self._metrics):
            self._metrics.update(paths)
        metrics = sorted(self._metrics.items())
        return {name: float(self._module.get_submodule(path).compute()) for name, path in metrics}


def _mean(weighted: Sequence[tuple[int, float]]) -> float:
    """Return the weighted mean; exactly the value if all values are equal."""
    values = {value for weight, value in weighted if weight}
    if len(values) == 1:
        return values.pop()
    return sum(weight * value for weight, value in weighted if weight) / sum(weight for weight, _ in weighted)


def _step(kind: str) -> Callable[..., Any]:
    return lambda module, *arguments, **named: module._hpctrain.run_step(module, kind, arguments, named)


def _step_end(kind: str) -> Callable[..., Any]:
    return lambda module, outputs: module._hpctrain.end_step(module, kind, outputs)


class LightningSteps:
    """Methods that replace those of a LightningModule while it is trained or evaluated."""

    _hpctrain: ModuleRun

    training_step, training_step_end = _step("training"), _step_end("training")
    validation_step, validation_step_end = _step("validation"), _step_end("validation")
    test_step, test_step_end = _step("test"), _step_end("test")
    predict_step, predict_step_end = _step("predict"), _step_end("predict")

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        users: Any = super()
        run, name = self._hpctrain, type(self).__name__
        optimizers, schedules = _unpack_optimizers(users.configure_optimizers())
        if not optimizers or not all(isinstance(value, torch.optim.Optimizer) for value in optimizers):
            raise UserError(
                f"{name}.configure_optimizers returned {optimizers!r} as optimizers. Return one or more "
                "instances of torch.optim.Optimizer."
            )
        run.proxy.optimizers = run.proxy.strategy._lightning_optimizers = optimizers
        for optimizer in optimizers:
            # A method of Lightning's wrapper of an optimizer.
            optimizer.toggle_model = partial(_toggle_model, self, optimizer)
        run.proxy.lr_scheduler_configs = [SimpleNamespace(**schedule) for schedule in schedules]
        if is_manual(self):
            return optimizers, [schedule["scheduler"] for schedule in schedules]
        if len(optimizers) > 1:
            raise UserError(
                f"{name}.configure_optimizers returned {len(optimizers)} optimizers. As in Lightning, "
                "several optimizers require manual optimization. Set self.automatic_optimization = False."
            )
        run.schedules = [LightningSchedule(self, run, **schedule) for schedule in schedules]
        return optimizers, run.schedules

    def log(self, name: str, value: Any, prog_bar: bool = False, **options: Any) -> None:  # noqa: ARG002
        self._hpctrain.log(self, name, value, options)  # type: ignore[arg-type]


class LightningSchedule:
    """Learning-rate schedule that advances when Lightning would advance it."""

    def __init__(
        self,
        module: Any,
        run: ModuleRun,
        *,
        scheduler: Any,
        interval: str = "epoch",
        frequency: int = 1,
        monitor: str | None = None,
        reduce_on_plateau: bool = False,
        **_: Any,
    ) -> None:
        self._module, self._run, self.scheduler, self._frequency = module, run, scheduler, frequency
        needs_metric = reduce_on_plateau or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.state_dict, self.load_state_dict = scheduler.state_dict, scheduler.load_state_dict
        self._monitor = monitor if needs_metric else None
        self.is_per_epoch = interval == "epoch" and not needs_metric
        self.period = partial(advance_period, interval, frequency, needs_metric)
        misses_metric = interval == "step" or monitor is None or not run.validates
        if interval not in ("epoch", "step") or (needs_metric and misses_metric):
            raise UserError(
                f"The {type(scheduler).__name__} returned by {type(module).__name__}.configure_optimizers() "
                f"has interval={interval!r} and monitor={monitor!r}. A ReduceLROnPlateau requires monitor, "
                "interval='epoch' and validation data. Other schedulers require interval='epoch' or 'step'."
            )

    def step(self) -> None:
        run = self._run
        assert run.source is not None
        if self._monitor is not None or (self.is_per_epoch and not run.source.at_epoch_end):
            return
        if ((run.proxy.current_epoch if self.is_per_epoch else run.batch_idx) + 1) % self._frequency == 0:
            self._module.lr_scheduler_step(self.scheduler, None)

    def step_after_validation(self, metrics: Mapping[str, float]) -> None:
        if self._monitor is None or (self._run.proxy.current_epoch + 1) % self._frequency:
            return
        value = metrics.get(self._monitor, metrics.get(f"val_{self._monitor}"))
        if value is None:
            raise UserError(
                f"A scheduler monitors {self._monitor!r}, but validation returned only these metrics: "
                f"{', '.join(sorted(metrics))}."
            )
        self._module.lr_scheduler_step(self.scheduler, value)


class LightningHooks(Callback):
    """Callback that calls a LightningModule's hooks, and saves the state of its DataModule."""

    def __init__(self, run: ModuleRun) -> None:
        self._run, self._datamodule = run, run.proxy.datamodule

    def on_fit_start(self, _trainer: Any, module: Any) -> None:
        self._run.start_fit()
        module.on_train_start()

    def on_validation_end(self, _trainer: Any, _module: Any, metrics: Mapping[str, float]) -> None:
        for schedule in self._run.schedules:
            schedule.step_after_validation(metrics)

    def on_fit_end(self, _trainer: Any, module: Any) -> None:
        module.on_train_end()
        module.on_fit_end()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {} if self._datamodule is None else self._datamodule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._datamodule is not None:
            self._datamodule.load_state_dict(state)


@contextmanager
def module_run(
    trainer: Any, module: Any, context: DistributedContext, datamodule: Any, stage: str
) -> Iterator[ModuleRun]:
    """Prepare a module for "fit", "validate", "test" or "predict" within the block."""
    if lightning_base(module) is None and datamodule is not None:
        raise UserError(
            f"A datamodule requires a LightningModule, but the module is of type "
            f"{type(module).__name__}. Pass data sets instead."
        )
    hosts = [module] if datamodule is None else [datamodule, module]
    for host in hosts:
        if isinstance(host, Module) or host is datamodule or lightning_base(host) is not None:
            _check_hooks(host, stage)
    run, kind = ModuleRun(trainer, module, context, datamodule), type(module)
    if run.has_hooks:
        _check_settings(trainer, module, context)
        for host in hosts:
            host.trainer = run.proxy
            per_node = getattr(host, "prepare_data_per_node", True)
            if context.ranks.local_rank == 0 if per_node else context.ranks.is_main:
                host.prepare_data()
        context.barrier()
        for host in hosts:
            host.setup(stage)
        module.configure_model()
        names = {"__module__": kind.__module__, "_user_class": kind}
        module.__class__ = type(kind.__name__, (LightningSteps, kind), names)
    module._hpctrain = run
    try:
        yield run
    finally:
        if run.has_hooks:
            module.__class__ = kind
        del module._hpctrain
    for host in hosts if run.has_hooks else ():
        host.teardown(stage)


def _check_settings(trainer: Any, module: Any, context: DistributedContext) -> None:
    manual = is_manual(module)
    computes_elsewhere = trainer.strategy in ("pipeline", "horovod") or (
        manual and trainer.strategy not in ("ddp", "ddp_spawn")
    )
    uses_gradients = manual or overrides(module, "on_before_optimizer_step")
    wrong = {
        "strategy": computes_elsewhere and len(context.devices) * context.ranks.world_size > 1,
        "compile": trainer.compile is not False,
        "micro_batch_size": trainer.micro_batch_size == "auto",
        "precision": trainer.precision == "16-mixed" and uses_gradients,
        "elastic_determinism": trainer.elastic_determinism,
    }
    if manual:  # the module decides these in `training_step`
        names = (
            *("micro_batch_size", "accumulate_grad_batches", "gradient_clip_norm", "gradient_clip_value"),
            *("lr_reference_batch_size", "warmup_steps", "algorithm"),
        )
        wrong |= {name: getattr(trainer, name) != getattr(type(trainer), name) for name in names}
        wrong["on_bad_loss"] = trainer.on_bad_loss == "skip"
    for setting, is_wrong in wrong.items():
        if is_wrong:
            kind = f"{type(module).__name__}{', which uses manual optimization' * manual}"
            raise UserError(
                f"{setting}={getattr(trainer, setting)!r} is not supported for the LightningModule {kind}. "
                "Remove this setting, or use an hpctrain.Module."
            )


def _unpack_optimizers(returned: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    schedules: list[Any] = []
    monitor = returned.get("monitor") if isinstance(returned, Mapping) else None
    match returned:
        case [[*optimizers], [*schedules]]:
            pass
        case Mapping() | [Mapping(), *_]:
            configs = [returned] if isinstance(returned, Mapping) else returned
            optimizers = [config.get("optimizer") for config in configs]
            schedules = [config.get("lr_scheduler") for config in configs]
        case [*optimizers]:
            pass
        case _:
            optimizers = [returned]
    return optimizers, [
        dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule, "monitor": monitor}
        for schedule in schedules
        if schedule is not None
    ]


@contextmanager
def _toggle_model(module: Any, optimizer: torch.optim.Optimizer, sync_grad: bool = True) -> Iterator[None]:
    del sync_grad  # gradients are averaged in every `manual_backward`
    module.toggle_optimizer(optimizer)
    try:
        yield
    finally:
        module.untoggle_optimizer(optimizer)


def _clip_gradients(optimizer: torch.optim.Optimizer, limit: float, algorithm: str) -> None:
    if limit > 0 and algorithm == "value":
        nn.utils.clip_grad_value_(parameters_of(optimizer), limit)
    elif limit > 0:
        nn.utils.clip_grad_norm_(parameters_of(optimizer), limit)
