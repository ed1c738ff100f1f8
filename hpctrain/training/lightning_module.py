"""Train and evaluate a LightningModule, with or without a LightningDataModule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.resumed_values import advance_period
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.callbacks import Callback
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import MicroBatch, StepData
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.module import as_scalars, collect_logged, is_manual
from hpctrain.training.module_run import (
    HOOK,
    REPLACEMENTS,
    ModuleRun,
    lightning_base,
    overrides,
    refuse_hooks,
)
from hpctrain.training.optim.optimizer_setup import parameters_of


class LightningTrainStep(TrainStep):
    """Optimizer steps that call the hooks of a LightningModule."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_manual = is_manual(self._module)
        self._user_module: Any = self._module  # mypy does not know the hooks of Lightning
        self._weight, self._losses = 1.0, list[torch.Tensor]()
        self._stepped: set[torch.optim.Optimizer] = set()
        needs_epochs = overrides(self._module, "on_train_epoch_end") or any(
            schedule.is_per_epoch for schedule in self._run.schedules
        )
        if needs_epochs and self._run.source.exchanges_ends:
            raise UserError(
                f"{type(self._module).__name__} has on_train_epoch_end or a scheduler with interval='epoch', "
                "but the number of steps per epoch is unknown, because the training data is a stream. Use "
                "on_train_batch_end or interval='step' instead."
            )
        if self._is_manual:
            self._run.backward = self._backward
            for optimizer in self._optimizers:
                optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(stepped))

    def run(self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator) -> None:
        with self._hooks(step.rank_batch, sums):
            super().run(step, micro_batches, sums)
            self._run.proxy.global_step = step.rank_batch.step
            self._user_module.on_train_batch_end(*self._run.step_end, step.rank_batch.batch_idx)
            self._run.step_end = ({}, None)

    def exclude_step(self, step: StepData, sums: MetricAccumulator) -> None:
        with self._hooks(step.rank_batch, sums):
            super().exclude_step(step, sums)

    @contextmanager
    def _hooks(self, rank_batch: RankBatch, sums: MetricAccumulator) -> Iterator[None]:
        run = self._run
        run.begin_step(rank_batch)
        with run.logging() as at_start:
            if rank_batch.batch_idx == 0:
                self._user_module.on_train_epoch_start()
        with run.logging(in_batch=True) as in_batch:
            yield
        run.proxy.global_step = rank_batch.step
        with run.logging() as at_end:
            if run.source.at_epoch_end:
                self._user_module.on_train_epoch_end()
                run.reset_metrics()
        per_rank = 1.0 / self._context.ranks.world_size
        share = len(rank_batch.indices) / rank_batch.batch_size
        for logged, weight in ((at_start, per_rank), (in_batch, share), (at_end, per_rank)):
            if logged:
                sums.put(as_scalars(logged, "", f"{type(self._module).__name__}.log"), weight)

    def _forward_backward(
        self, rank_batch: RankBatch, micro_batch: MicroBatch, sums: MetricAccumulator, is_last: bool
    ) -> None:
        super()._forward_backward(rank_batch, micro_batch, sums, is_last)
        self._user_module.on_after_backward()

    def _complete_gradients(
        self, optimizers: Sequence[torch.optim.Optimizer], per_token: torch.Tensor | None
    ) -> torch.Tensor | None:
        self._strategy.before_update()
        for optimizer in optimizers:
            self._user_module.on_before_optimizer_step(optimizer)
        return super()._complete_gradients(optimizers, per_token)

    def _advance(self, step: int, *, updated: bool) -> None:
        if not self._is_manual:  # otherwise, the module advances its schedules
            super()._advance(step, updated=updated)

    def _update(
        self,
        step: StepData,
        micro_batches: Iterable[MicroBatch],
        optimizers: Sequence[torch.optim.Optimizer],
        sums: MetricAccumulator,
    ) -> bool:
        if not self._is_manual:
            return super()._update(step, micro_batches, optimizers, sums)
        (micro_batch,) = micro_batches
        num_samples = micro_batch.num_samples
        share = num_samples / step.rank_batch.batch_size
        self._weight, self._losses = share * self._num_parts, []
        self._stepped.clear()
        self._strategy.sync_buffers()  # as DDP does before each forward pass
        batch = self._to_device(micro_batch.batch)
        with self._forward_context, collect_logged(self._module, num_samples) as logged:
            output, _ = self._strategy.training_step(batch, step.rank_batch.batch_idx, num_samples)
        # Gradients of other optimizers are accumulated in further steps, and saved in checkpoints.
        for optimizer in self._stepped:
            optimizer.zero_grad(set_to_none=True)
        if self._losses:
            output = {"loss": torch.stack(self._losses).sum(), **output}
        sums.add(as_scalars(output, "loss", self._origin), share)
        self._add_logged(logged, output, share, sums)
        return True

    def _backward(self, loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        """Add the mean of the gradients of all ranks, weighted by their samples."""
        self._losses.append(loss.detach())
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        weighted: Any = loss if self._weight == 1.0 else loss * self._weight
        weighted.backward(*arguments, **options)
        if self._context.is_distributed:
            self._average_gradients(parameters)
        for parameter, earlier in zip(parameters, before, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _average_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        # The ranks may use different parameters.
        is_used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(is_used, dist.ReduceOp.MAX, group=self._context.cpu_group)
        gradients = []
        for parameter, flag in zip(parameters, is_used.tolist(), strict=True):
            if flag:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        assert self._strategy.algorithm is not None
        self._strategy.algorithm.average(gradients)


#: Methods of Lightning that a user's class may override.
_SUPPORTED = {
    *("training_step", "validation_step", "test_step", "predict_step", "prepare_data", "setup", "teardown"),
    *("load_from_checkpoint", "to_onnx", "to_torchscript", "to_tensorrt", "state_dict", "on_fit_end"),
    *("configure_model", "configure_optimizers", "lr_scheduler_step"),
    *("load_state_dict", "on_save_checkpoint", "on_load_checkpoint", "on_fit_start", "on_after_backward"),
    *("on_before_optimizer_step", "on_after_batch_transfer"),
    *(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict")),
    *(
        f"on_{stage}{unit}_{end}"
        for stage in ("train", "validation", "test")
        for unit in ("", "_epoch", "_batch")
        for end in ("start", "end")
    ),
}
#: Replacements for hooks that hpctrain does not call, among those that it calls.
_CALLED_REPLACEMENTS = {
    "configure_sharded_model": "configure_model",
    "on_before_batch_transfer": "on_after_batch_transfer",
    "on_before_zero_grad": "on_train_batch_end",
    "transfer_batch_to_device": "on_after_batch_transfer or collate_fn",
    "test_epoch_end": "on_test_epoch_end",
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
}


class LightningRun(ModuleRun):
    """Training or evaluation of a LightningModule, with its hooks."""

    step_class = LightningTrainStep

    def __init__(
        self, trainer: Any, module: Any, context: DistributedContext, datamodule: Any, stage: str
    ) -> None:
        super().__init__(trainer, module, context, datamodule, stage)
        self._check_settings(trainer)
        self.callbacks = [LightningHooks(self)]
        #: Schedules that hpctrain advances.
        self.schedules: list[LightningSchedule] = []
        self.batch_idx = 0
        #: Output and batch of the last training step, for `on_train_batch_end`.
        self.step_end: tuple[Mapping[str, Any], Any] = ({}, None)
        #: Implementation of `manual_backward`.
        self.backward: Callable[..., None]
        self._batch: tuple[Any, int] = (None, 0)
        self._has_started = self._is_in_step = False
        self.proxy.lr_scheduler_configs = []
        self.proxy.strategy.backward = lambda loss, _optimizer, *args, **options: self.backward(
            loss, *args, **options
        )
        # LightningModule's own methods use these.
        self.proxy.progress_bar_callback = self.proxy.gradient_clip_val = None
        self.proxy.gradient_clip_algorithm = None
        self.proxy.precision_plugin = SimpleNamespace(clip_gradients=_clip_gradients)

    @property
    def _hosts(self) -> list[Any]:
        return [self._module] if self._datamodule is None else [self._datamodule, self._module]

    def __enter__(self) -> Self:
        ranks, kind = self._context.ranks, type(self._module)
        for host in self._hosts:
            host.trainer = self.proxy
            per_node = getattr(host, "prepare_data_per_node", True)
            if ranks.local_rank == 0 if per_node else ranks.is_main:
                host.prepare_data()
        self._context.barrier()
        for host in self._hosts:
            host.setup(self._stage)
        self._module.configure_model()
        names = {"__module__": kind.__module__, "_user_class": kind}
        self._module.__class__ = type(kind.__name__, (LightningSteps, kind), names)
        return super().__enter__()

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        self._module.__class__ = self._module._user_class
        super().__exit__(error, *details)
        for host in self._hosts if error is None else ():
            host.teardown(self._stage)

    def _check_hooks(self) -> None:
        for host in self._hosts:
            base = lightning_base(host, "LightningModule", "LightningDataModule")
            hooks = [
                name
                for name in dir(type(host))
                if (
                    HOOK.fullmatch(name) or (name[0] != "_" and inspect.isfunction(getattr(base, name, None)))
                )
                and not (name in _SUPPORTED or hasattr(nn.Module, name))
                and overrides(host, name)
            ]
            replacements = {**REPLACEMENTS, **_CALLED_REPLACEMENTS}
            refuse_hooks(host, hooks, self._stage, replacements, "hpctrain.lightning.Trainer")
        for step in ("training_step", "validation_step", "test_step", "predict_step"):
            parameters = inspect.signature(getattr(self._module, step)).parameters
            if unknown := parameters.keys() & {"dataloader_iter", "optimizer_idx", "hiddens"}:
                raise UserError(
                    f"{type(self._module).__name__}.{step} has the parameter {min(unknown)}, which hpctrain "
                    "does not pass. Remove the parameter."
                )

    def _check_settings(self, trainer: Any) -> None:
        module, manual = self._module, is_manual(self._module)
        computes_elsewhere = trainer.strategy in ("pipeline", "horovod") or (
            manual and trainer.strategy not in ("ddp", "ddp_spawn")
        )
        uses_gradients = manual or overrides(module, "on_before_optimizer_step")
        num_devices = len(self._context.devices) * self._context.ranks.world_size
        wrong = {
            "strategy": computes_elsewhere and num_devices > 1,
            "compile": trainer.compile is not False,
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
        if setting := next((name for name in wrong if wrong[name]), None):
            raise UserError(
                f"{setting}={getattr(trainer, setting)!r} is not supported for the LightningModule "
                f"{type(module).__name__}{', which uses manual optimization' * manual}. Remove this setting, "
                "or use an hpctrain.Module."
            )

    def find_data(self, data: Any, name: str) -> Any:
        return None if name == "val" and not self.validates else super().find_data(data, name)

    def start_fit(self) -> None:
        """Call `on_fit_start` once, before the first validation."""
        if not self._has_started and self.state is not None:
            self._has_started = True
            self.proxy.global_step, self.proxy.current_epoch = self.state.step, self.state.epoch
            self._module.on_fit_start()

    def begin_step(self, rank_batch: RankBatch) -> None:
        super().begin_step(rank_batch)
        self.batch_idx = rank_batch.batch_idx

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
        """Return the metrics or predictions of a step, given the outputs of `run_step` on all devices."""
        users: Any = super(LightningSteps, module)
        end = getattr(users, f"{kind}_step_end", None)
        outputs = outputs if end is None else end(outputs)
        if self._is_in_step:
            return outputs
        if kind != "training":
            getattr(users, f"on_{kind}_batch_end")(outputs, *self._batch)
            return outputs if kind == "predict" else {}  # only logged values are metrics
        outputs = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        loss = outputs.get("loss")
        if loss is None and not is_manual(module):
            raise UserError(
                f"{type(module).__name__}.training_step returned no loss. Return a loss for every batch."
            )
        self.step_end = ({} if loss is None else {**outputs, "loss": loss.detach()}, self._batch[0])
        return {} if loss is None else {"loss": loss}

    def begin_evaluation(self, kind: str, *, is_sanity: bool) -> None:
        self.start_fit()
        super().begin_evaluation(kind, is_sanity=is_sanity)
        getattr(self._module, f"on_{kind}_start")()
        getattr(self._module, f"on_{kind}_epoch_start")()

    def end_evaluation(self, kind: str, means: Mapping[str, float], num_samples: float) -> dict[str, float]:
        self.results = {**means, **self.compute_metrics()}
        hook = f"on_{kind}_epoch_end"
        with self.logging() as logged:
            getattr(self._module, hook)()
        results = {**means, **self.compute_metrics()}  # the hook may log more
        self.results = {**results, **self._average_logged(hook, logged, num_samples)}
        self.reset_metrics()
        getattr(self._module, f"on_{kind}_end")()
        results, self.results = self.results, {}
        self.proxy.validating = self.proxy.sanity_checking = False
        return results

    def _average_logged(self, hook: str, logged: Mapping[str, Any], num_samples: float) -> dict[str, float]:
        """Return the means over all ranks of the values that a hook has logged, weighted by samples."""
        gathered = self._context.all_gather((num_samples, {name: float(logged[name]) for name in logged}))
        names = gathered[0][1].keys()
        for rank, (_, rank_values) in enumerate(gathered):
            if rank_values.keys() != names:
                raise UserError(
                    f"{type(self._module).__name__}.{hook} logs {sorted(names)} on rank 0, but "
                    f"{sorted(rank_values)} on rank {rank}. Log the same names on every rank."
                )
        return {name: _mean([(weight, values[name]) for weight, values in gathered]) for name in names}


def _mean(weighted: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean; exactly the value if all values are equal."""
    weighted = [(weight, value) for weight, value in weighted if weight]
    if len({value for _, value in weighted}) == 1:
        return weighted[0][1]
    return sum(weight * value for weight, value in weighted) / sum(weight for weight, _ in weighted)


def _step(kind: str) -> Callable[..., Any]:
    return lambda module, *arguments, **named: module._hpctrain.run_step(module, kind, arguments, named)


def _step_end(kind: str) -> Callable[..., Any]:
    return lambda module, outputs: module._hpctrain.end_step(module, kind, outputs)


class LightningSteps:
    """Methods that replace those of a LightningModule while it is trained or evaluated."""

    _hpctrain: LightningRun

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
        run.schedules = [LightningSchedule(self, run, schedule) for schedule in schedules]
        return optimizers, run.schedules

    def log(self, name: str, value: Any, prog_bar: bool = False, **options: Any) -> None:  # noqa: ARG002
        self._hpctrain.log(self, name, value, options)  # type: ignore[arg-type]


class LightningSchedule:
    """Learning-rate schedule that advances when Lightning would advance it."""

    def __init__(self, module: Any, run: LightningRun, config: Mapping[str, Any]) -> None:
        scheduler, monitor = config["scheduler"], config.get("monitor")
        interval = config.get("interval", "epoch")
        self._module, self._run, self.scheduler = module, run, scheduler
        self._frequency = frequency = config.get("frequency", 1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        needs_metric = config.get("reduce_on_plateau", False) or isinstance(scheduler, plateau)
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

    def __init__(self, run: LightningRun) -> None:
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
