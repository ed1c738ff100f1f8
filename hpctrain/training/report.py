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


@dataclass(frozen=True)
class StepResult:
    """One step, summed over all ranks; the same value on every rank."""

    step: int
    epoch: int
    stop: bool
    """Whether any rank was told to stop."""
    save: bool
    """Whether rank 0 wants a checkpoint."""
    news: float
    """What the feeds of all ranks have to tell."""
    scalars: dict[str, float]
    """Means over the global batch; `loss` is among them."""


class StepReport:
    """A step's sum, on its way."""

    def __init__(
        self,
        team: Team,
        step: int,
        epoch: int,
        scalars: Mapping[str, torch.Tensor],
        *,
        stop: bool,
        save: bool,
        news: float,
    ) -> None:
        """Send this rank's part. All ranks must call this, with the same names in `scalars`.

        Args:
            team: the ranks that take part.
            step: the optimizer step, from 1.
            epoch: the epoch it lies in, from 0.
            scalars: this rank's part of each mean over the global batch.
            stop: whether this rank was told to stop.
            save: whether this rank wants a checkpoint.
            news: what this rank's feed has to tell.
        """
        self._step, self._epoch, self._names = step, epoch, list(scalars)
        self._read = _send(team, [float(stop), float(save), news], list(scalars.values()))

    def read(self) -> StepResult:
        """Wait for the sum, which has had a step's time to arrive."""
        stop, save, news, *values = self._read()
        return StepResult(
            self._step, self._epoch, stop > 0, save > 0, news, dict(zip(self._names, values, strict=True))
        )


class ScalarSums:
    """This rank's part of the means over the global batch, added up over its micro-batches."""

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def add(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Add means over samples that are `share` of the global batch.

        Raises:
            KeyError: the names are not those of the micro-batch before.
        """
        # A rank without samples went through the motions on one that is not its own; 0 · inf would be nan.
        parts = {
            name: scalar.detach().double() * share if share else torch.zeros_like(scalar, dtype=torch.float64)
            for name, scalar in scalars.items()
        }
        self.values = (
            {name: self.values[name] + part for name, part in parts.items()} if self.values else parts
        )


def _send(team: Team, flags: list[float], scalars: list[torch.Tensor]) -> Callable[[], list[float]]:
    """Begin to sum over all ranks; returns what waits for the sum."""
    device = team.device
    if not team.is_distributed and device.type == "cpu":
        return lambda: [*flags, *(scalar.item() for scalar in scalars)]
    values = torch.stack([scalar.to(device, non_blocking=True) for scalar in scalars])
    total = torch.cat([torch.tensor(flags, dtype=torch.float64).to(device, non_blocking=True), values])
    pending = dist.all_reduce(total, async_op=True) if team.is_distributed else None
    if device.type == "cpu":

        def read() -> list[float]:
            if pending is not None:
                pending.wait()
            return list(total.tolist())

        return read
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
