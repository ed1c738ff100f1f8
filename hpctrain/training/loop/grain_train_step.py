"""Optimizer steps whose result does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.training.base import rng
from hpctrain.training.base.metric_accumulator import TOKENS_FIELD, MetricAccumulator, exact_sum
from hpctrain.training.base.tensors import align_tensors
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import MapStepSource, MicroBatch, StepData
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.determinism.fixed_point import exact_norm
from hpctrain.training.determinism.gradient_sum import GradientSum
from hpctrain.training.determinism.witness import Witness, hash_gradients
from hpctrain.training.loop.train_step import TokenCounter, TrainStep
from hpctrain.training.module import has_step_end, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies import Strategy
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState


class GrainPass(NamedTuple):
    """A forward and a backward pass."""

    grain: MicroBatch
    scalars: MetricAccumulator
    """Receives the metrics of the grain."""
    is_last: bool
    """True for the last pass of the step on this rank."""


class _TokenWeights(TokenCounter):
    """Weights of losses that are means over tokens."""

    def add(self, count: torch.Tensor, rank_batch: RankBatch, is_last: bool) -> torch.Tensor:  # noqa: ARG002
        return count.detach().to(self._context.device, torch.float32) / rank_batch.batch_size


class GrainTrainStep(TrainStep):
    """Steps in which every grain of samples is computed by itself."""

    def __init__(
        self,
        determinism: ElasticDeterminism,
        strategy: Strategy,
        optimization: OptimizerSetup,
        settings: TrainerConfig,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(strategy, optimization, settings, scaler)
        _check(strategy, settings, optimization)
        assert settings.grain_size is not None
        self._grain_size, self._seed = settings.grain_size, settings.seed
        self._num_parts, self._tokens = 1, _TokenWeights(strategy.context, 1)
        context = strategy.context
        self._gradients = GradientSum(
            context, strategy.summed_parameters(), self._module, settings.bucket_cap_mb, determinism.exponents
        )
        self._witness: Witness | None = None

    def add_witness(self, witness: Witness, source: MapStepSource, state: TrainingState) -> None:
        """Compare gradients with those of other ranks every few steps, and record this in `state`."""
        self._witness, self._source, self._state = witness, source, state
        if state.witnessed_step is None:
            state.witnessed_step = 0

    def passes(
        self, rank_batch: RankBatch, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator
    ) -> Iterator[GrainPass]:
        """Yield each grain of this rank, for a forward and a backward pass; may yield all grains again."""
        own = list(micro_batches)
        num_grains = -(-rank_batch.batch_size // self._grain_size)
        first = rank_batch.start // self._grain_size
        witness = self._witness
        if witness is not None and rank_batch.step % witness.every:
            witness = None
        chosen = witness and witness.chosen_grain(rank_batch, self._context.ranks.rank)
        while True:
            self._gradients.begin(num_grains)
            own_hashes: dict[int, int] = {}
            sums.values, sums.width = {}, num_grains
            for number, grain in enumerate(own, first):
                is_last = number == first + len(own) - 1
                # A rank without samples repeats a grain of another rank, and the result is not used.
                is_used, scalars = grain.num_samples > 0, MetricAccumulator()
                used = number if is_used else None
                hashes = own_hashes if is_used and number == chosen else None
                self._seed_grain(rank_batch, number)
                with self._gradients.grain(used, is_last=is_last, hashes=hashes):
                    yield GrainPass(grain._replace(batch=align_tensors(grain.batch)), scalars, is_last)
                self._insert(sums, scalars, used, is_first=number == first)
            if witness is not None:
                self._compare(witness, rank_batch, own_hashes if chosen is not None else None)
            if self._gradients.finish():
                break
        rng.seed_all(rng.derive_seed(self._seed, "step", rank_batch.step))

    def _seed_grain(self, rank_batch: RankBatch, number: int) -> None:
        rng.seed_all(rng.derive_seed(self._seed, "grain", rank_batch.step, number))

    def _accumulate(
        self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator
    ) -> torch.Tensor | None:
        for one in self.passes(step.rank_batch, micro_batches, sums):
            self._run_micro_batch(step.rank_batch, one.grain, one.scalars, one.is_last)
        return self._token_factor(step.rank_batch, sums)

    def _token_factor(self, rank_batch: RankBatch, sums: MetricAccumulator) -> torch.Tensor | None:
        counts = sums.values.get(TOKENS_FIELD)
        if counts is None:
            return None
        counts = torch.as_tensor(counts).to(self._context.device, copy=True)
        if self._context.is_distributed:
            dist.all_reduce(counts)
        return torch.tensor(rank_batch.batch_size / max(exact_sum(counts.tolist()), 1.0))

    def _compare(self, witness: Witness, rank_batch: RankBatch, own_hashes: dict[int, int] | None) -> None:

        def recompute(number: int) -> int:
            hashes: dict[int, int] = {}
            grain = self._source.grain(rank_batch.step, number)
            grain = grain._replace(batch=align_tensors(grain.batch))
            self._seed_grain(rank_batch, number)
            with self._gradients.grain(None, is_last=False, hashes=hashes):
                self._run_micro_batch(rank_batch, grain, MetricAccumulator(), is_last=False)
            return hash_gradients(hashes)

        own_hash = None if own_hashes is None else hash_gradients(own_hashes)
        witness.compare(rank_batch, own_hash, recompute, self._state.verified_step or 0)
        self._state.witnessed_step = rank_batch.step

    def _insert(
        self, sums: MetricAccumulator, scalars: MetricAccumulator, number: int | None, *, is_first: bool
    ) -> None:
        """Insert the values of a grain at its place among the grains of all ranks; None for zeros."""
        if not is_first and sums.values.keys() != scalars.values.keys():
            raise UserError(
                f"The metrics of a grain are {sorted(scalars.values)}, but those of the previous grain are "
                f"{sorted(sums.values)}. Return or log the same metrics for every grain."
            )
        for name, value in scalars.values.items():
            if name not in sums.values:
                device = value.device if isinstance(value, torch.Tensor) else None
                sums.values[name] = torch.zeros(sums.width, dtype=torch.float64, device=device)
            values = sums.values[name]
            assert isinstance(values, torch.Tensor)
            if number is not None:
                values[number] = value

    def _can_split_batches(self) -> bool:
        return False

    def _gradient_norm(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return exact_norm(parameters, self._context)

    def _record_norm(self, sums: MetricAccumulator, norm: torch.Tensor) -> None:
        values = torch.zeros(sums.width, dtype=torch.float64, device=norm.device)
        if self._context.ranks.rank == 0:
            values[0] = norm.detach().double()
        sums.values.setdefault("grad_norm", values)


def _is_compiled(layer: torch.nn.Module) -> bool:
    # The class of torch.compile's result is in a module whose import takes long.
    return type(layer).__name__ == "OptimizedModule" or layer._compiled_call_impl is not None


def _check(strategy: Strategy, settings: TrainerConfig, optimization: OptimizerSetup) -> None:
    module, reason = strategy.module, None
    own = set(module.parameters())
    if not strategy.sums_exactly:
        reason = f"strategy is {settings.strategy!r}. Use 'ddp', 'ddp2', 'zero1', 'zero2', 'zero3' or 'fsdp'"
    elif settings.algorithm != "allreduce":
        reason = (
            f"algorithm is {settings.algorithm!r}, whose result depends on the number of ranks. Remove the "
            "setting algorithm"
        )
    elif settings.compile is not False:
        reason = (
            f"compile is {settings.compile!r}, and compiled code may differ between ranks. Remove the "
            "setting compile"
        )
    elif any(map(_is_compiled, module.modules())):
        reason = "the module is compiled, and compiled code may differ between ranks. Remove torch.compile"
    elif settings.on_bad_loss == "skip":
        reason = "on_bad_loss is 'skip'. Use 'stop' or 'rollback'"
    elif any(isinstance(layer, torch.nn.SyncBatchNorm) for layer in module.modules()):
        reason = "the module contains a SyncBatchNorm, whose groups depend on the ranks. Use BatchNorm"
    elif not strategy.has_complete_state and any(
        group.get("fused") for optimizer in optimization.optimizers for group in optimizer.param_groups
    ):
        reason = (
            f"strategy is {settings.strategy!r}, and an optimizer has fused=True, whose rounding depends on "
            "the position of an element in its shard. Use foreach=True"
        )
    elif takes_optimizer_idx(module):
        reason = (
            "training_step accepts optimizer_idx. Remove this parameter, and return one loss for all "
            "optimizers"
        )
    elif strategy.has_complete_state and not own.issuperset(
        p for each in optimization.optimizers for p in parameters_of(each) if p.requires_grad
    ):
        reason = (
            "an optimizer updates a parameter that no module contains, so the gradient of this parameter "
            "would not be summed. Assign the parameter to the module. In a session, pass the module to "
            "prepare()"
        )
    elif (
        strategy.gathers_samples
        and has_step_end(module, "training_step")
        and not settings.given.keys() & {"grain_size", "micro_batch_size"}
    ):
        reason = (
            f"strategy is {settings.strategy!r}, and {type(module).__name__}.training_step_end combines "
            "samples, but their number is unknown. Set grain_size to the number of samples to combine"
        )
    if reason:
        raise UserError(f"elastic_determinism is True, but {reason}.")
