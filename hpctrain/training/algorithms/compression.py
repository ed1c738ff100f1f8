"""Average gradients in 16 or 8 bits, or with a low rank, or Adam's momenta in 8 bits."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from hpctrain.errors import UserError
from hpctrain.torch_compat import all_gather_single
from hpctrain.training.algorithms.algorithm import BucketAlgorithm, GradBucket, completed_future
from hpctrain.training.optim.optimizer_setup import OptimizerSetup
from hpctrain.training.trainer_config import TrainerConfig


class _HalfPrecision(BucketAlgorithm):
    hook: ClassVar[Any]
    """A communication hook of torch; it takes a process group, or None for all ranks."""

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        self.sent_bytes += 2 * bucket.buffer().numel()
        exchanged: Future[torch.Tensor] = self.hook(None, bucket)
        return exchanged


class Float16(_HalfPrecision):
    """All-reduce in float16, with 11 bits of precision: values above 65,504 overflow, below 6e-8 vanish."""

    hook = staticmethod(default_hooks.fp16_compress_hook)


class BFloat16(_HalfPrecision):
    """All-reduce in bfloat16, with 8 bits of precision and the range of float32."""

    hook = staticmethod(default_hooks.bf16_compress_hook)


_LEVELS = 255
#: Bound of a momentum, in units of its deviation, for Adam's default betas.
_LARGEST = 3.0


class QuantizedRows(NamedTuple):
    codes: torch.Tensor
    """uint8, of shape [rows, n]."""
    ranges: torch.Tensor
    """float32, of shape [rows, 2]: minimum and maximum."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.ranges.nbytes

    @classmethod
    def quantize(cls, rows: torch.Tensor) -> QuantizedRows:
        """Round `rows`, of shape [rows, n], to the nearest of 256 levels."""
        low, high = rows.amin(1, keepdim=True).float(), rows.amax(1, keepdim=True).float()
        step = ((high - low) / _LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((rows.float() - low) / step).round().clamp(0, _LEVELS).to(torch.uint8)
        return cls(codes, torch.cat([low, high], 1))

    def dequantize(self) -> torch.Tensor:
        low, high = self.ranges[:, :1], self.ranges[:, 1:]
        return low + self.codes.float() * ((high - low) / _LEVELS)


def quantized_all_reduce_mean(flat: torch.Tensor, world_size: int) -> tuple[torch.Tensor, int]:
    """Return the mean of a vector over all ranks, sent at 8 bits per element, and the bytes sent.

    Each rank receives a piece of the vector from all others, averages it, and sends the mean to all
    (ByteGrad: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021).
    """
    length = -(-len(flat) // world_size)
    padded = torch.nn.functional.pad(flat, (0, length * world_size - len(flat)))
    sent = QuantizedRows.quantize(padded.view(world_size, length))
    received = QuantizedRows(*map(torch.empty_like, sent))
    for target, source in zip(received, sent, strict=True):
        dist.all_to_all_single(target, source)
    piece = QuantizedRows.quantize(received.dequantize().mean(0, keepdim=True))
    for target, source in zip(received, piece, strict=True):
        all_gather_single(target, source)
    return received.dequantize().reshape(-1)[: len(flat)], sent.nbytes + piece.nbytes


class ByteGrad(BucketAlgorithm):
    """Averaging of gradient buckets at one byte per element, scaled to a bucket's minimum and maximum."""

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        mean, sent = quantized_all_reduce_mean(gradients, self.context.ranks.world_size)
        self.sent_bytes += sent
        return completed_future(gradients.copy_(mean))


class PowerSGD(BucketAlgorithm):
    """Transfer of gradients of shape [n, m] as [n, rank] and [m, rank], by one step of a power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.
    Before a checkpoint, the ranks average their residuals, which preserves the next mean. Residuals are
    stored by parameter, not by bucket as in torch's hook, so checkpoints do not depend on the bucket size.
    """

    keeps_gradients = True

    def __init__(self, rank: int = 2, seed: int = 0) -> None:
        """Use `rank` columns, initially drawn from `seed`, which must be the same on all ranks."""
        super().__init__()
        self.rank, self._seed = rank, seed
        self._number: dict[torch.Tensor, int] = {}
        self._errors: dict[int, torch.Tensor] = {}
        self._columns: dict[int, torch.Tensor] = {}

    def attach(self, parallel: DistributedDataParallel) -> None:
        self._number = {parameter: number for number, parameter in enumerate(self.parameters)}
        super().attach(parallel)

    def synchronize(self) -> None:
        self.average([self._errors[number] for number in sorted(self._errors)])

    def state_dict(self) -> dict[str, Any]:
        if not self._columns:
            return self._state
        names = sorted(self._columns)
        return {
            "errors": {str(number): self._errors[number] for number in names},
            "columns": {str(number): self._columns[number] for number in names},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for name, tensors in (("errors", self._errors), ("columns", self._columns)):
            for number, tensor in state.get(name, {}).items():
                like = self.parameters[int(number)] if self._number else tensor
                tensors[int(number)] = tensor.to(like.device, copy=True)

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        matrices: list[tuple[int, torch.Tensor]] = []
        uncompressed: list[torch.Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if gradient.ndim > 1 and self._is_smaller(gradient.reshape(len(gradient), -1)):
                matrices.append((self._number[parameter], gradient))
            else:
                uncompressed.append(gradient)
        self.average(uncompressed)
        if matrices:
            self._compress(matrices)
        return completed_future(bucket.buffer())

    def _compress(self, numbered: list[tuple[int, torch.Tensor]]) -> None:
        inputs = []
        for number, gradient in numbered:
            matrix = gradient.reshape(len(gradient), -1)
            if number not in self._columns:
                self._errors[number] = torch.zeros_like(matrix)
                generator = torch.Generator().manual_seed(self._seed + number)
                columns = torch.randn(matrix.shape[1], self.rank, generator=generator)
                self._columns[number] = columns.to(matrix.device, matrix.dtype)
            inputs.append(matrix + self._errors[number])
        bases = [torch.linalg.qr(self._columns[number])[0] for number, _ in numbered]
        left = [matrix @ basis for matrix, basis in zip(inputs, bases, strict=True)]
        self.average(left)
        left = [torch.linalg.qr(rows)[0] for rows in left]
        right = [matrix.T @ rows for matrix, rows in zip(inputs, left, strict=True)]
        self.average(right)
        for (number, gradient), matrix, rows, cols in zip(numbered, inputs, left, right, strict=True):
            product = rows @ cols.T
            self._errors[number].copy_(matrix - product)
            self._columns[number] = cols
            gradient.copy_(product.view_as(gradient))

    def _is_smaller(self, matrix: torch.Tensor) -> bool:
        rows, columns = matrix.shape
        return self.rank <= min(rows, columns) and self.rank * (rows + columns) < matrix.numel()


class QAdam(BucketAlgorithm):
    """Adam with averaged gradients during the warm-up, and with averaged momenta afterwards.

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    2021; 8 bits without error feedback as in Gan et al., "BAGUA", 2021. The momenta are averaged in units of
    their deviation, and the variance is frozen.
    """

    keeps_gradients = True

    def __init__(self, warmup_steps: int = 100) -> None:
        super().__init__()
        self.warmup_steps = warmup_steps
        self._step = 0

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        super().check(settings)
        for name in ("gradient_clip_norm", "gradient_clip_value"):
            if getattr(settings, name) is not None:
                raise UserError(
                    f"{name} is {getattr(settings, name)!r}, but algorithm 'qadam' exchanges momenta, so "
                    f"there is no averaged gradient to clip. Remove {name}, or choose another algorithm."
                )
        if settings.precision == "16-mixed":
            raise UserError(
                "precision='16-mixed' does not work with algorithm='qadam': the momenta would include "
                "the loss scale. Use precision='bf16-mixed'."
            )

    def setup_optimizers(self, optimization: OptimizerSetup) -> None:
        super().setup_optimizers(optimization)
        self._group: dict[torch.Tensor, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        for optimizer in optimization.optimizers:
            plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            if not plain or any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
                raise UserError(
                    "algorithm='qadam' supports only Adam and AdamW, without amsgrad or maximize, but "
                    "configure_optimizers() returned "
                    f"{type(optimizer).__name__}{' with one of these options enabled' * plain}. Change the "
                    "optimizer, or choose another algorithm."
                )
            for group in optimizer.param_groups:
                self._group |= dict.fromkeys(group["params"], (optimizer, group))
            self._replace_step(optimizer)

    def on_optimizer_step_end(self, step: int) -> None:
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._step = state.get("step", 0)

    @property
    def _is_warm(self) -> bool:
        return self._step >= self.warmup_steps

    def exchange(self, bucket: GradBucket) -> Future[torch.Tensor]:
        gradients = bucket.buffer()
        if not self._is_warm:
            gradients /= self.context.ranks.world_size
            self.all_reduce(gradients)
            return completed_future(gradients)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            optimizer, group = self._group[parameter]
            beta = group["betas"][0]
            if group["weight_decay"] and type(optimizer) is torch.optim.Adam:
                gradient.add_(parameter.detach(), alpha=group["weight_decay"])
            gradient.mul_(1 - beta).add_(optimizer.state[parameter]["exp_avg"], alpha=beta)
            # In units of the deviation: otherwise rounding would erase elements with small or zero gradients.
            # Without the clamp, elements without variance in the warm-up would use the complete range.
            gradient.div_(self._deviation(parameter)).clamp_(-_LARGEST, _LARGEST)
        mean, sent = quantized_all_reduce_mean(gradients, self.context.ranks.world_size)
        self.sent_bytes += sent
        gradients.copy_(mean)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradient.mul_(self._deviation(parameter))
        return completed_future(gradients)

    def _deviation(self, parameter: torch.Tensor) -> torch.Tensor:
        optimizer, group = self._group[parameter]
        # The variance is from the warm-up, and so is its bias correction.
        settled = 1 - group["betas"][1] ** float(self.warmup_steps)
        root: torch.Tensor = (optimizer.state[parameter]["exp_avg_sq"] / settled).sqrt_()
        return root.add_(group["eps"])

    def _replace_step(self, optimizer: torch.optim.Optimizer) -> None:
        plain_step = optimizer.step

        # Keep the attributes of the original: LR schedulers mark `step` and check for the mark.
        @functools.wraps(plain_step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self._momentum_step(optimizer) if self._is_warm else plain_step(*args, **kwargs)

        optimizer.step = step  # type: ignore[method-assign]

    @torch.no_grad()
    def _momentum_step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            beta = group["betas"][0]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                state["step"] += 1
                state["exp_avg"].copy_(parameter.grad)
                if group["weight_decay"] and type(optimizer) is torch.optim.AdamW:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] / (1 - beta ** float(state["step"]))
                parameter.addcdiv_(state["exp_avg"], self._deviation(parameter), value=-float(rate))
