"""Evaluate a module: means over all samples, validations during training, predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.record_types import RankPhase
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.base.metric_accumulator import exact_sum
from hpctrain.training.base.rng import derive_seed, preserve_state, seed_all, seeded_rng, snapshot_buffers
from hpctrain.training.base.tensors import (
    align_tensors,
    cast_batch,
    cast_module,
    forward_context,
    map_tensors,
)
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import ValidationSet, make_validation_set
from hpctrain.training.data.loader_config import make_loader_config, to_device
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.loop.step_sync import MessageBatcher, start_sum
from hpctrain.training.module import Module, as_scalars, collect_logged, find_run
from hpctrain.training.observe.run_writer import format_scalars
from hpctrain.training.strategies import Strategy, find_strategy
from hpctrain.training.trainer_config import TrainerConfig

T = TypeVar("T")


class Evaluation:
    """Evaluation of a module with its strategy, on a data set divided among the ranks."""

    def __init__(
        self,
        settings: TrainerConfig,
        module: Module,
        context: DistributedContext,
        dataset: Any,
        environ: Mapping[str, str],
    ) -> None:
        strategy = find_strategy(settings.strategy, environ)
        self._data = make_validation_set(
            dataset,
            make_loader_config(settings, context),
            DataRank(context.ranks.rank, context.ranks.world_size, settings.grain_size),
            context,
            name="dataset",
        )
        self._data.max_batch_size = settings.micro_batch_size
        cast_module(module, settings.precision)
        self._strategy = strategy(module, context, settings)
        self._determinism = settings.grain_size and ElasticDeterminism(context, settings.grain_size)

    def means(self, method: str) -> dict[str, float]:
        with self._exact():
            means = run_validation(self._strategy, self._data, method=method)
        assert means is not None  # no stop flag was passed, so it cannot be interrupted
        return means

    def predictions(self) -> list[Any]:
        outputs = []
        strategy, context = self._strategy, self._strategy.context
        with (
            self._exact(),
            eval_mode(strategy.module),
            torch.no_grad(),
            closing(self._data.batches()) as rank_batches,
        ):
            batches = _pad_to_longest(rank_batches, context) if strategy.in_lockstep else rank_batches
            start = self._data.first_batch() if self._determinism else None
            for output, _, _, num_held in _evaluate_batches(strategy, "predict_step", batches, start):
                if num_held:
                    outputs.append(map_tensors(output, lambda tensor: tensor.cpu()))
        return [*chain(*context.all_gather(outputs, "the result of predict_step"))]

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """With `elastic_determinism`, make results independent of the number of ranks in this block."""
        if not self._determinism:
            yield
            return
        with self._determinism.deterministic_algorithms(), seeded_rng(self._strategy.settings.seed):
            yield

    def close(self) -> None:
        self._strategy.finish()


def run_validation(
    strategy: Strategy,
    data: ValidationSet,
    *,
    method: str = "validation_step",
    num_batches: int | None = None,
    stop: StopFlag | None = None,
) -> dict[str, float] | None:
    """Collective. Return the means of a method over all samples; None if the ranks agreed to stop."""
    context = strategy.context
    means = _SampleMeans(context, f"{type(strategy.module).__name__}.{method}")
    loop = StoppableLoop(context, stop or StopFlag())
    run, kind = find_run(strategy.module), method.removesuffix("_step")
    lone_name = "test_loss" if kind == "test" else "val_loss"
    with eval_mode(strategy.module), torch.no_grad(), closing(data.batches()) as all_batches:
        if run is not None:
            run.begin_evaluation(kind, is_sanity=num_batches is not None)
        limited = islice(all_batches, num_batches)
        batches = loop.iterate(_pad_to_longest(limited, context) if strategy.in_lockstep else limited)
        start = data.first_batch() if strategy.settings.elastic_determinism else None
        for output, logged, num_samples, num_held in _evaluate_batches(strategy, method, batches, start):
            if num_samples:
                output = {} if output is None and logged else output
                means.add(as_scalars(output, lone_name, means.origin), num_samples, logged, num_held)
                activity.set_phase(RankPhase.VALIDATE)
        if loop.interrupted:
            return None
        results = means.over_ranks()
        return results if run is None else run.end_evaluation(kind, results, means.count)


def _evaluate_batches(
    strategy: Strategy, method: str, batches: Iterable[tuple[int, Any]], start: int | None
) -> Iterator[tuple[Any, dict[str, torch.Tensor], float, int]]:
    """Call a method of the module on each of `batches`, pairs of number of samples and batch.

    With `start`, the number of the first batch of all ranks, random numbers depend only on the number of a
    batch. Yields output, logged scalars, the samples that the output represents, and those of this rank.
    """
    device, precision = strategy.context.device, strategy.settings.precision
    origin = f"{type(strategy.module).__name__}.log"
    for batch_idx, (num_held, batch) in enumerate(batches, start or 0):
        if start is not None:
            batch = align_tensors(batch)
            seed_all(derive_seed(strategy.settings.seed, "evaluation", batch_idx))
        # As in Lightning, predictions cannot log.
        logs: Any = nullcontext({}) if method == "predict_step" else collect_logged(strategy.module, num_held)
        with forward_context(precision, device), logs as logged:
            on_device = cast_batch(to_device(batch, device), precision)
            output, num_samples = strategy.evaluation_step(method, on_device, batch_idx, num_held)
        yield output, as_scalars(logged, "", origin), num_samples, num_held


def _pad_to_longest(
    batches: Iterator[tuple[int, Any]], context: DistributedContext
) -> Iterator[tuple[int, Any]]:
    """Collective. Yield as many batches as the rank with the most; spare batches have 0 samples."""
    spare: tuple[int, Any] | None = None
    batch = next(batches, None)
    while ranks := [rank for rank, has in enumerate(context.all_gather(batch is not None)) if has]:
        if spare is None and len(ranks) < context.ranks.world_size:  # only possible before the first batch
            spare = context.broadcast(batch, ranks[0], "a batch for ranks without batches")
        spare = batch or spare
        assert spare is not None
        yield (spare[0] if batch else 0), spare[1]
        batch = next(batches, None)


class _SampleMeans:
    """Means of metrics over the samples of all ranks; `count` is the number of samples of this rank."""

    def __init__(self, context: DistributedContext, origin: str) -> None:
        self.origin, self._context = origin, context
        self._terms: dict[str, list[torch.Tensor]] = {}
        self.count = 0.0

    def add(
        self,
        scalars: Mapping[str, torch.Tensor],
        num_samples: float,
        logged: Mapping[str, torch.Tensor],
        num_held: int,
    ) -> None:
        terms, names = self._terms, {**logged, **scalars}.keys()
        if terms and terms.keys() != names:
            raise UserError(
                f"{self.origin} returned or logged the metrics {sorted(names)} for a batch, but "
                f"{sorted(terms)} for earlier batches. Return the same metrics for every batch."
            )
        for name in names:
            value, count = (scalars[name], num_samples) if name in scalars else (logged[name], num_held)
            terms.setdefault(name, []).append(value.double() * count if count else torch.zeros(()).double())
        self.count += num_samples

    def over_ranks(self) -> dict[str, float]:
        """Collective. Return the means, whose sums are rounded once, for any assignment of batches."""
        rank_terms = {name: torch.stack(terms).tolist() for name, terms in self._terms.items()}
        gathered = self._context.all_gather((self.count, rank_terms), "the metrics of the batches")
        # A rank without samples does not have the names.
        names_of = {rank: list(terms) for rank, (count, terms) in enumerate(gathered) if count}
        if not names_of:
            raise UserError(f"The data set for {self.origin} yielded no samples on any rank.")
        first_rank = min(names_of)
        for rank, names in names_of.items():
            if set(names) != set(names_of[first_rank]):
                raise UserError(
                    f"{self.origin} returned the metrics {sorted(names)} on rank {rank}, but "
                    f"{sorted(names_of[first_rank])} on rank {first_rank}. Return the same metrics on every "
                    "rank."
                )
        total = sum(count for count, _ in gathered)
        return {
            name: exact_sum(chain(*(terms.get(name, ()) for _, terms in gathered))) / total
            for name in names_of[first_rank]
        }


class StoppableLoop:
    """Loop in which each rank iterates over its own batches until a rank receives a stop signal."""

    def __init__(self, context: DistributedContext, stop: StopFlag) -> None:
        self._context, self._stop, self._batcher = context, stop, MessageBatcher()
        self._read: Callable[[], list[float]] | None = None
        self.interrupted = False

    def iterate(self, batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            yield batch
            self._batcher.add()
            self._receive()
            if self.interrupted:
                return
            if self._batcher.is_full:
                self._send(has_more=True)
        go_on = True
        while go_on:
            if self._read is None:
                self._send(has_more=False)
            go_on = self._receive()

    def _send(self, *, has_more: bool) -> None:
        seconds = self._batcher.seconds_per_item() if has_more else 0.0
        self._read = start_sum(self._context, [float(self._stop.is_set), float(has_more), seconds])

    def _receive(self) -> bool:
        """Read the pending message, if any; return True if a rank has batches left and there is no stop."""
        if self._read is None:
            return True
        stop, num_busy, seconds = self._read()
        self._read = None
        self.interrupted = stop > 0
        if num_busy:
            self._batcher.adapt(seconds / num_busy)
        return num_busy > 0 and not self.interrupted


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in modes:
            layer.training = mode


class Validator:
    def __init__(self, shared: Components, data: ValidationSet | None) -> None:
        self._shared, self._state, self._data = shared, shared.state, data
        self._every = None if data is None else shared.settings.validate_every
        #: Metrics that the training has, too.
        self._training_names = {"loss"}

    def limit_batches(self, num_samples: int | None) -> None:
        if self._data is not None:
            self._data.max_batch_size = num_samples

    def due(self) -> bool:
        """Return true if a validation is due and did not already run before a stop at this step."""
        interval, state = self._every, self._state
        if interval is None or state.step in (0, state.validated_step):
            return False
        return state.finished or (
            self._shared.source.at_epoch_end if interval == "epoch" else state.step % interval == 0
        )

    def run(self) -> bool:
        """Validate; return False, with unchanged state, if the ranks agreed to stop meanwhile."""
        assert self._data is not None
        shared, state = self._shared, self._state
        # Checkpoints do not contain a callback's request to end, so this validation must not be interrupted.
        stop = None if state.finished and not shared.source.finished else shared.stop
        put_back = snapshot_buffers(shared.module)
        with activity.in_phase(RankPhase.VALIDATE), shared.step_timer.measure("validation"):
            results = run_validation(shared.strategy, self._data, stop=stop)
        if results is None:
            put_back()
            return False
        # `loss` without prefix is the training loss. An excluded step has no metrics.
        self._training_names |= results.keys() & state.latest.keys()
        results = {
            f"val_{name}" if name in self._training_names else name: mean for name, mean in results.items()
        }
        state.validation, state.validated_step = results, state.step
        state.latest = {**state.latest, **state.validation}
        shared.progress.print_message(f"step {state.step}: {format_scalars(state.validation)}")
        shared.callbacks.call("on_validation_end", state.step, state.validation)
        shared.end_if_requested()
        return True

    def check_sanity(self) -> None:
        shared, settings = self._shared, self._shared.settings
        if self._data is None or self._every is None or not settings.sanity_val_batches:
            return
        with preserve_state(shared.module):
            results = run_validation(shared.strategy, self._data, num_batches=settings.sanity_val_batches)
        # Names shared with the training have the prefix "val_"; now, only `loss` is known to be shared.
        names = {"val_loss" if name == "loss" else name for name in results or {}}
        accepted = {*names, *(f"val_{name}" for name in results or {})}
        shared.callbacks.check_names(names, accepted)
        if settings.keep_best and settings.monitor.startswith("val_") and settings.monitor not in accepted:
            raise UserError(
                f"keep_best={settings.keep_best} selects checkpoints by monitor={settings.monitor!r}, but "
                f"validation returned only these metrics: {', '.join(sorted(names))}."
            )
