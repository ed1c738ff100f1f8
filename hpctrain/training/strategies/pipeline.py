"""Pipeline parallelism: each rank computes a stage of the module, and micro-batches pass through the stages.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019; the order
of the passes (1F1B) follows Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
2019. Based on torch.distributed.pipelining.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hpctrain.cluster import Ranks
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.torch_compat import pytree
from hpctrain.training.base.rng import derive_seed, preserve_state, seeded_rng
from hpctrain.training.base.tensors import slice_batch
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.module import Module, as_scalars
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies.strategy import Strategy, joint_norm
from hpctrain.training.trainer_config import TrainerConfig

#: Default number of micro-batches per stage: more micro-batches reduce the idle time of stages.
_MICRO_BATCHES_PER_STAGE = 4


def pipeline_micro_batch_sizes(num_samples: int, max_size: int | None, num_stages: int) -> list[int]:
    """Return the sizes of micro-batches, in descending order; equal sizes save memory, so they come first."""
    if max_size is None:
        default = min(_MICRO_BATCHES_PER_STAGE * num_stages, num_samples)
        counts = range(default, default // 2, -1)
    else:
        min_count = -(-num_samples // max_size)
        counts = range(min_count, 2 * min_count)
    count = next((count for count in counts if num_samples % count == 0), counts[0])
    size, num_larger = divmod(num_samples, count)
    return [size + 1] * num_larger + [size] * (count - num_larger)


class _MicroBatch(NamedTuple):
    batch: Any
    weight: float
    """Share of the samples of the step."""
    seed: int
    """Seed of the training step's random numbers, on the first and the last stage."""


class Pipeline(Strategy):
    """Strategy in which every rank has the global batch, and rank r updates the parameters of stage r.

    Every rank has the weights of all stages. These are updated before a validation and before a checkpoint. A
    validation is divided among the ranks as usual. A checkpoint fits any number of stages and any other
    strategy.

    The part of the training step before the Sequential runs on the first stage. The part after the Sequential
    runs on the last stage, which calls the step again and substitutes the stages' output.
    """

    splits_batches = True
    supports_toggling = False

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        if settings.precision == "16-mixed":
            raise UserError(
                "precision='16-mixed' does not work with strategy='pipeline': the pipeline schedule "
                "starts the backward pass before the loss can be scaled. Use 'bf16-mixed'."
            )

    @classmethod
    def data_rank(cls, _ranks: Ranks) -> DataRank:
        return DataRank(0, 1)

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        super().__init__(module, context, settings)
        self._is_pending = False
        if context.is_distributed:
            if "scale_grads" not in inspect.signature(ScheduleGPipe).parameters:
                raise self.torch_is_too_old()
            self._split_module()
            self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
            # A loaded checkpoint contains the state of all ranks.
            self._has_all_states = True
            self._is_last = context.ranks.rank == context.ranks.world_size - 1
            self._shapes: dict[Any, tuple[Any, Any]] = {}
            self._names: list[str] = []
            for tensor in (*module.parameters(), *module.buffers()):
                dist.broadcast(tensor.data, src=0)

    @property
    def counts_tokens(self) -> bool:
        return not self.context.is_distributed

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if not self.context.is_distributed:
            return super().training_step(batch, batch_idx, num_samples)
        self._is_pending = True
        self._drop_states_of_others()
        arguments = (batch_idx, *self.optimizer_idx)
        max_size = self.settings.micro_batch_size
        sizes = pipeline_micro_batch_sizes(num_samples, max_size, self.context.ranks.world_size)
        seed = torch.randint(2**62, (1,))
        dist.broadcast(seed, src=0, group=self.context.cpu_group)
        ended: list[dict[str, torch.Tensor]] = []
        for micro_batches in _split(batch, sizes, int(seed)):
            self._run(micro_batches, arguments, ended)
        if not self._names:
            names = list(ended[0]) if self._is_last else None
            self._names = self.context.broadcast(names, self.context.ranks.world_size - 1) or []
        if not self._is_last:
            return {name: torch.zeros((), device=self.context.device) for name in self._names}, 0
        return {name: torch.stack([s[name] for s in ended]).sum() for name in self._names}, num_samples

    def backward(self, loss: torch.Tensor) -> None:
        # With several ranks, the schedule has already run the backward passes.
        if not self.context.is_distributed:
            super().backward(loss)

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        if self.context.is_distributed:
            self._optimizers = optimization.optimizers
        return optimization

    def before_update(self) -> None:
        """Sum the gradients of parameters that belong to no stage or to several stages."""
        if not (self._is_pending and self.context.is_distributed):
            return
        self._is_pending = False
        self._check_gradients()
        shared = self._shared
        has_gradient = torch.tensor([parameter.grad is not None for parameter in shared], dtype=torch.int32)
        dist.all_reduce(has_gradient, group=self.context.cpu_group)
        for parameter, count in zip(shared, has_gradient.tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)

    def gradient_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        if not self.context.is_distributed:
            return super().gradient_norm(parameters)
        shared = set(self._shared)
        return joint_norm(parameters, lambda parameter: parameter not in shared, self.context.device)

    def sync_buffers(self) -> None:
        if not self.context.is_distributed:
            return
        in_stages = {buffer for buffers in self._stage_buffers for buffer in buffers}
        outside = [buffer for buffer in self.module.buffers() if buffer not in in_stages]
        for rank, parameters in enumerate(self._stage_parameters):
            # Only the last rank runs the layers after the Sequential.
            further = outside if rank == self.context.ranks.world_size - 1 else []
            for tensor in (*parameters, *self._stage_buffers[rank], *further):
                dist.broadcast(tensor.data, src=rank)
        self._gather_states()

    def _gather_states(self) -> None:
        """Gather the state of all ranks' optimizers for a checkpoint. That of other ranks is on the CPU."""
        for rank, parameters in enumerate(self._stage_parameters):
            rank_states: list[Any] = [[opt.state.get(p) for p in parameters] for opt in self._optimizers]
            rank_states = self.context.broadcast(rank_states, rank, "the state of an optimizer")
            if rank != self.context.ranks.rank:
                for optimizer, states in zip(self._optimizers, rank_states, strict=True):
                    _set_state(optimizer, parameters, states)
        for optimizer in self._optimizers:
            # In the order of the parameters, to make the states equal on all ranks.
            for parameter in parameters_of(optimizer):
                if parameter in optimizer.state:
                    optimizer.state[parameter] = optimizer.state.pop(parameter)
        self._has_all_states = True

    def _drop_states_of_others(self) -> None:
        """Drop the state of other ranks, to keep the memory savings of the stages."""
        if self._has_all_states:
            self._has_all_states = False
            for rank, parameters in enumerate(self._stage_parameters):
                if rank != self.context.ranks.rank:
                    for optimizer in self._optimizers:
                        _set_state(optimizer, parameters, [None] * len(parameters))

    def _run(
        self,
        micro_batches: list[_MicroBatch],
        arguments: tuple[int, ...],
        ended: list[dict[str, torch.Tensor]],
    ) -> None:
        """Run the passes of micro-batches of equal size; on the last rank, add their scalars to `ended`."""

        def loss_of(output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            batch, weight, seed = micro_batches[int(number)]
            result = self._finish_step(output, batch, arguments, seed)
            scalars = as_scalars(result, "loss", type(self.module).__name__)
            ended.append({name: value.detach() * weight for name, value in scalars.items()})
            return scalars["loss"] * weight

        def run_stage(inputs: torch.Tensor) -> torch.Tensor:
            # The first stage receives the number of a micro-batch.
            if not (inputs.dtype == torch.int64 and inputs.numel() == 1):
                return self._run_stage(inputs, None, arguments)
            batch, _, seed = micro_batches[int(inputs)]
            return self._run_stage(inputs, batch, arguments, seed)

        ranks, device = self.context.ranks, self.context.device
        inputs, output = self._find_shapes(micro_batches[0].batch, arguments)
        stage = PipelineStage(
            _Stage(run_stage), ranks.rank, ranks.world_size, device, input_args=inputs, output_args=output
        )
        kind = Schedule1F1B if len(micro_batches) >= ranks.world_size else ScheduleGPipe
        # `loss_of` scales the loss: torch would scale only gradients inside of the stages.
        schedule = kind(stage, len(micro_batches), loss_fn=loss_of, scale_grads=False)
        numbers = torch.arange(len(micro_batches), device=device)
        if ranks.rank == 0:
            schedule.step(numbers)
        elif self._is_last:
            schedule.step(target=numbers)
        else:
            schedule.step()

    def _find_shapes(self, batch: Any, arguments: tuple[int, ...]) -> tuple[Any, Any]:
        """Return this rank's stage input and output for such a batch; a new shape passes all stages once."""
        shapes = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else None
            for leaf in pytree.tree_leaves(batch)
        )
        key = (shapes, torch.is_autocast_enabled(self.context.device.type))
        if key not in self._shapes:
            inputs = output = torch.zeros(1, dtype=torch.int64, device=self.context.device)
            shape: Any = None
            with preserve_state(self.module), torch.no_grad():
                for rank in range(self.context.ranks.world_size):
                    if rank == self.context.ranks.rank:
                        if rank > 0:
                            inputs = torch.zeros(shape[0], dtype=shape[1], device=self.context.device)
                        output = self._run_stage(inputs, batch, arguments)
                    shape = self.context.broadcast((tuple(output.shape), output.dtype), rank)
            # From these, the schedule derives the tensors to receive, and if gradients are sent back.
            self._shapes[key] = inputs.requires_grad_(inputs.is_floating_point()), output.requires_grad_()
        return self._shapes[key]

    def _split_module(self) -> None:
        """Divide the module's largest Sequential into stages of about equal size."""
        num_stages = self.context.ranks.world_size
        self._sequential = _find_largest(self.module, num_stages)
        blocks = list(self._sequential)
        ends = _stage_ends([sum(p.numel() for p in block.parameters()) for block in blocks], num_stages)
        stages = [nn.Sequential(*blocks[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        self._layers = stages[self.context.ranks.rank]
        counts = Counter(p for _, p in self.module.named_parameters(remove_duplicate=False))
        #: For each rank, the parameters only in its stage.
        self._stage_parameters: list[list[nn.Parameter]] = []
        for layers in stages:
            inside = Counter(p for _, p in layers.named_parameters(remove_duplicate=False))
            self._stage_parameters.append([p for p in inside if inside[p] == counts[p]])
        self._stage_buffers = [list(layers.buffers()) for layers in stages]
        in_one_stage = {p for parameters in self._stage_parameters for p in parameters}
        #: All other parameters; any rank may have a part of the gradients.
        self._shared = [p for p in self.module.parameters() if p not in in_one_stage]

    def _run_stage(
        self, inputs: torch.Tensor, batch: Any, arguments: tuple[int, ...], seed: int = 0
    ) -> torch.Tensor:
        """Return the stage's output; the first stage draws the same numbers from `seed` as `_finish_step`."""
        if self.context.ranks.rank > 0:
            output: torch.Tensor = self._layers(inputs)
            return output

        def cut(*inputs: Any) -> torch.Tensor:
            raise _StageBoundary(self._layers(*inputs))

        try:
            with seeded_rng(seed), self._replace_sequential(cut):
                self.module.training_step(batch, *arguments)
        except _StageBoundary as end:
            return end.output
        raise UserError(
            f"{type(self.module).__name__}.training_step did not call the Sequential that strategy "
            "'pipeline' splits into stages. Call this Sequential in training_step, or use another "
            "strategy."
        )

    def _finish_step(self, output: torch.Tensor, batch: Any, arguments: tuple[int, ...], seed: int) -> Any:
        calls = 0

        def give(*_: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserError(
                    f"{type(self.module).__name__}.training_step calls the Sequential more than once. "
                    "Strategy 'pipeline' splits this Sequential into stages and can run it only once per "
                    "micro-batch. Concatenate the inputs (torch.cat) and call it once, or use strategy "
                    "'zero3'."
                )
            return output

        with seeded_rng(seed), self._replace_sequential(give):
            return self.module.training_step_end(self.module.training_step(batch, *arguments))

    def _check_gradients(self) -> None:
        elsewhere = {
            p
            for rank, params in enumerate(self._stage_parameters)
            if rank != self.context.ranks.rank
            for p in params
        }
        for name, parameter in self.module.named_parameters():
            if parameter in elsewhere and parameter.grad is not None:
                raise UserError(
                    f"{type(self.module).__name__}.training_step uses {name} outside the Sequential that "
                    "strategy 'pipeline' splits into stages (for example, in a penalty on all weights). "
                    "Only the rank of the parameter's stage can update it. Use the optimizer's "
                    "weight_decay instead, or strategy 'zero3'."
                )

    @contextmanager
    def _replace_sequential(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        self._sequential.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._sequential.forward


class _Stage(nn.Module):
    """Stage of this rank for torch's schedules."""

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._run(inputs)


def _split(batch: Any, sizes: list[int], seed: int) -> Iterator[list[_MicroBatch]]:
    start, num_samples = 0, sum(sizes)
    for size, group in groupby(sizes):
        micro_batches = []
        for _ in group:
            samples = slice_batch(batch, num_samples, start, start + size)
            micro_batches.append(_MicroBatch(samples, size / num_samples, derive_seed(seed, start)))
            start += size
        yield micro_batches


def _set_state(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], states: list[Any]
) -> None:
    """Set an optimizer's state for these parameters; None removes it."""
    for parameter, state in zip(parameters, states, strict=True):
        if state is None:
            optimizer.state.pop(parameter, None)
        else:
            optimizer.state[parameter] = state


class _StageBoundary(Exception):
    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


def _find_largest(module: nn.Module, num_stages: int) -> nn.Sequential:
    candidates = [
        layer for layer in module.modules() if isinstance(layer, nn.Sequential) and len(layer) >= num_stages
    ]
    if not candidates:
        raise UserError(
            f"Strategy 'pipeline' splits a torch.nn.Sequential into {num_stages} stages, one per rank, "
            f"but no Sequential in {type(module).__name__} has that many blocks. Put the blocks into one "
            "Sequential, or start fewer ranks."
        )
    return max(candidates, key=lambda layer: sum(parameter.numel() for parameter in layer.parameters()))


def _stage_ends(sizes: list[int], num_stages: int) -> list[int]:
    ends: list[int] = []
    total, sum_so_far = sum(sizes), 0
    for number, size in enumerate(sizes, 1):
        sum_so_far += size
        num_left, num_missing = len(sizes) - number, num_stages - 1 - len(ends)
        if num_missing and (sum_so_far >= total * (len(ends) + 1) / num_stages or num_left == num_missing):
            ends.append(number)
    return [*ends, len(sizes)]
