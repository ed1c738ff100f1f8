"""Perform optimizer steps whose result does not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.training.base import rng
from hpctrain.training.base.metric_accumulator import TOKENS_FIELD, MetricAccumulator, exact_sum
from hpctrain.training.base.tensors import align_tensors
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.data.step_source import MapStepSource, MicroBatch, StepData, StepSource
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.determinism.fixed_point import exact_norm
from hpctrain.training.determinism.gradient_sum import GradientSum
from hpctrain.training.determinism.witness import Witness, hash_gradients, witness_distance
from hpctrain.training.loop.train_step import TokenCounter, TrainStep
from hpctrain.training.module import has_step_end, takes_optimizer_idx
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.replica_check import own_suspect
from hpctrain.training.strategies import Strategy
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState


class _TokenWeights(TokenCounter):
    def add(self, count: torch.Tensor, rank_batch: RankBatch, is_last: bool) -> torch.Tensor:  # noqa: ARG002
        return count.detach().to(self._context.device, torch.float32) / rank_batch.batch_size


class GrainTrainStep(TrainStep):
    """Steps in which every grain of samples is computed by itself."""

    def __init__(
        self,
        determinism: ElasticDeterminism,
        strategy: Strategy,
        optimization: OptimizerSetup,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(strategy, optimization, scaler)
        settings = strategy.settings
        _check(strategy, settings, optimization)
        assert settings.grain_size is not None
        self._grain_size, self._seed = settings.grain_size, settings.seed
        self._num_parts, self._tokens = 1, _TokenWeights(strategy.context, 1)
        context = strategy.context
        self._gradients = GradientSum(
            context, strategy.summed_parameters(), self._module, settings.bucket_cap_mb, determinism.exponents
        )
        self._witness: Witness | None = None

    def add_witness(self, every: int, source: StepSource, state: TrainingState) -> None:
        """Compare gradients with those of other ranks every few steps, and record this in `state`."""
        assert isinstance(source, MapStepSource)
        if source.loading.num_workers and source.loading.worker_init_fn is not None:
            raise UserError(
                "witness_every recomputes grains in the main process, without the DataLoader's "
                "worker_init_fn. Remove witness_every or worker_init_fn, or set num_workers=0."
            )
        context = self._context
        devices = own_suspect(context), witness_distance(context)
        self._witness = Witness(context, every, self._grain_size, self._seed, *devices)
        self._source, self._state = source, state
        if state.witnessed_step is None:
            state.witnessed_step = 0

    def _accumulate(
        self, step: StepData, micro_batches: Iterable[MicroBatch], sums: MetricAccumulator
    ) -> torch.Tensor | None:
        rank_batch, rank_grains = step.rank_batch, list(micro_batches)
        num_grains = -(-rank_batch.batch_size // self._grain_size)
        first_number = rank_batch.start // self._grain_size
        witness = self._witness
        if witness is not None and rank_batch.step % witness.every:
            witness = None
        chosen = witness and witness.chosen_grain(rank_batch, self._context.ranks.rank)
        while True:
            self._gradients.begin(num_grains)
            chosen_hashes: dict[int, int] = {}
            sums.values, sums.width = {}, num_grains
            for number, grain in enumerate(rank_grains, first_number):
                is_last = number == first_number + len(rank_grains) - 1
                # A rank without samples repeats a grain of another rank, and the result is not used.
                is_used, scalars = grain.num_samples > 0, MetricAccumulator()
                used_number = number if is_used else None
                hashes = chosen_hashes if is_used and number == chosen else None
                self._seed_grain(rank_batch, number)
                with self._gradients.grain(used_number, is_last=is_last, hashes=hashes):
                    grain = grain._replace(batch=align_tensors(grain.batch))
                    self._run_micro_batch(rank_batch, grain, scalars, is_last)
                self._insert(sums, scalars, used_number, is_first=number == first_number)
            if witness is not None:
                self._compare(witness, rank_batch, chosen_hashes if chosen is not None else None)
            if self._gradients.finish():
                break
        rng.seed_all(rng.derive_seed(self._seed, "step", rank_batch.step))
        counts = sums.values.get(TOKENS_FIELD)
        if counts is None:
            return None
        counts = torch.as_tensor(counts).to(self._context.device, copy=True)
        if self._context.is_distributed:
            dist.all_reduce(counts)
        return torch.tensor(rank_batch.batch_size / max(exact_sum(counts.tolist()), 1.0))

    def _seed_grain(self, rank_batch: RankBatch, number: int) -> None:
        rng.seed_all(rng.derive_seed(self._seed, "grain", rank_batch.step, number))

    def _compare(self, witness: Witness, rank_batch: RankBatch, chosen_hashes: dict[int, int] | None) -> None:
        def recompute(number: int) -> int:
            hashes: dict[int, int] = {}
            grain = self._source.grain(rank_batch.step, number)
            grain = grain._replace(batch=align_tensors(grain.batch))
            self._seed_grain(rank_batch, number)
            with self._gradients.grain(None, is_last=False, hashes=hashes):
                self._run_micro_batch(rank_batch, grain, MetricAccumulator(), is_last=False)
            return hash_gradients(hashes)

        chosen_hash = None if chosen_hashes is None else hash_gradients(chosen_hashes)
        witness.compare(rank_batch, chosen_hash, recompute, self._state.verified_step or 0)
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
    module, layers = strategy.module, list(strategy.module.modules())
    name, optimizers = f"strategy is {settings.strategy!r}", optimization.optimizers
    trained = {p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad}
    is_fused = any(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups)
    is_grain_size_given = settings.given.keys() & {"grain_size", "micro_batch_size"}
    differs = "may differ between ranks"
    problems = {
        f"{name}. Use 'ddp', 'ddp2', 'zero1', 'zero2', 'zero3' or 'fsdp'": not strategy.sums_exactly,
        f"algorithm is {settings.algorithm!r}, whose result {differs}": settings.algorithm != "allreduce",
        f"compile is {settings.compile!r}, and compiled code {differs}": settings.compile is not False,
        f"the module is compiled, and compiled code {differs}": any(map(_is_compiled, layers)),
        "on_bad_loss is 'skip'. Use 'stop' or 'rollback'": settings.on_bad_loss == "skip",
        "the module contains a SyncBatchNorm, whose groups depend on the ranks. Use BatchNorm": any(
            isinstance(layer, torch.nn.SyncBatchNorm) for layer in layers
        ),
        f"{name}, and an optimizer has fused=True, whose rounding depends on the position of an element in "
        "its shard. Use foreach=True": is_fused and not strategy.has_complete_state,
        "training_step accepts optimizer_idx. Remove this parameter, and return one loss for all "
        "optimizers": takes_optimizer_idx(module),
        "an optimizer updates a parameter that no module contains, so the gradient of this parameter would "
        "not be summed. Assign the parameter to the module": (
            strategy.has_complete_state and not trained.issubset(module.parameters())
        ),
        f"{name}, and {type(module).__name__}.training_step_end combines samples, but their number is "
        "unknown. Set grain_size to the number of samples to combine": (
            strategy.gathers_samples and has_step_end(module, "training_step") and not is_grain_size_given
        ),
    }
    for problem, applies in problems.items():
        if applies:
            raise UserError(f"elastic_determinism is True, but {problem}.")
