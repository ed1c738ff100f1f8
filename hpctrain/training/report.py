"""What the ranks tell each other in every step: loss, a wish to stop, a wish to save, news of the data.

The sum travels while the next step computes and is read at its end, so no step waits for it. All ranks
read the same sum at the same step, which is what makes a stop agreed: nobody asks, nobody can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.runtime.process_group import Team

#: What a training step calls the number of tokens, or whatever else, that its loss is the mean over.
TOKENS = "num_tokens"


@dataclass(frozen=True)
class StepResult:
    """One step, summed over all ranks; the same value on every rank."""

    step: int
    epoch: int
    stop: bool
    """Whether any rank was told to stop."""
    save: bool
    """Whether rank 0 wants a checkpoint."""
    end: bool
    """Whether any rank wants the training to end with what it has reached."""
    news: float
    """What the feeds of all ranks have to tell."""
    scalars: dict[str, float]
    """Means over the global batch; `loss` is among them. `num_tokens`, where there is one, is a sum."""


class StepReport:
    """A step's sum, on its way."""

    def __init__(
        self,
        team: Team,
        step: int,
        epoch: int,
        sums: ScalarSums,
        *,
        stop: bool,
        save: bool,
        end: bool,
        news: float,
    ) -> None:
        """Send this rank's part. All ranks must call this, with the same names in `sums`.

        Args:
            team: the ranks that take part.
            step: the optimizer step, from 1.
            epoch: the epoch it lies in, from 0.
            sums: this rank's part of each mean over the global batch.
            stop: whether this rank was told to stop.
            save: whether this rank wants a checkpoint.
            end: whether this rank wants the training to end.
            news: what this rank's feed has to tell.
        """
        self._step, self._epoch, self._names = step, epoch, list(sums.values)
        self._read = _send(team, [float(stop), float(save), float(end), news], list(sums.values.values()))

    def read(self) -> StepResult:
        """Wait for the sum, which has had a step's time to arrive."""
        stop, save, end, news, *values = self._read()
        scalars = dict(zip(self._names, values, strict=True))
        if scalars.get(TOKENS):
            scalars["loss"] /= scalars[TOKENS]
        return StepResult(self._step, self._epoch, stop > 0, save > 0, end > 0, news, scalars)


class ScalarSums:
    """This rank's part of the means over the global batch, added up over its micro-batches."""

    def __init__(self) -> None:
        # Numbers where the host computes them anyway: reading them is cheaper than adding up tensors.
        self.values: dict[str, torch.Tensor | float] = {}

    def add(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Add means over samples that are `share` of the global batch.

        Where `num_tokens` is among them, `loss` is the mean over so many, whatever the samples.

        Raises:
            KeyError: the names are not those of the micro-batch before.
        """
        tokens = _double(scalars[TOKENS]) if TOKENS in scalars else None
        parts: dict[str, torch.Tensor | float] = {}
        for name, scalar in scalars.items():
            weight = share if tokens is None or name not in ("loss", TOKENS) else 1.0
            # A rank without samples computed with one that is not its own; 0 · inf would be nan.
            part = _double(scalar) * weight if share else 0.0 * _double(torch.zeros_like(scalar))
            parts[name] = part * tokens if tokens is not None and name == "loss" else part
        self.values = (
            {name: self.values[name] + part for name, part in parts.items()} if self.values else parts
        )

    def join(self, other: ScalarSums) -> None:
        """Add what another optimizer's pass over the batch gave: losses add up, others are put beside."""
        losses = [each.values["loss"] for each in (self, other) if "loss" in each.values]
        self.values |= other.values
        if losses:
            self.values["loss"] = sum(losses[1:], losses[0])


def _double(scalar: torch.Tensor) -> torch.Tensor | float:
    """As float64: a number on the CPU, which has computed it by now; a tensor on a GPU, which has not."""
    return scalar.item() if scalar.device.type == "cpu" else scalar.detach().double()


def _send(team: Team, flags: list[float], scalars: list[torch.Tensor | float]) -> Callable[[], list[float]]:
    """Begin to sum over all ranks; returns what waits for the sum."""
    device = team.device
    if device.type == "cpu":
        own = [*flags, *map(float, scalars)]
        if not team.is_distributed:
            return lambda: own
        total = torch.tensor(own, dtype=torch.float64)
        pending = dist.all_reduce(total, async_op=True)

        def read() -> list[float]:
            pending.wait()
            return list(total.tolist())

        return read
    values = [torch.as_tensor(scalar, dtype=torch.float64) for scalar in scalars]
    host = torch.tensor(flags, dtype=torch.float64)
    total = torch.cat(
        [host.to(device, non_blocking=True), *(v.reshape(1).to(device, non_blocking=True) for v in values)]
    )
    pending = dist.all_reduce(total, async_op=True) if team.is_distributed else None
    # The copy to the host has a stream of its own: read on the stream that computes, the value would have to
    # wait for the step after, which is queued there by then.
    aside = _stream_aside(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    arrived = torch.empty(len(total), dtype=torch.float64, pin_memory=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        if pending is not None:
            pending.wait()
        arrived.copy_(total, non_blocking=True)
        event.record(aside)
    # The memory of `total` may be used anew only when the copy is done.
    total.record_stream(aside)

    def read_on_host() -> list[float]:
        event.synchronize()
        return list(arrived.tolist())

    return read_on_host


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]
