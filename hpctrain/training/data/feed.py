"""What the training loop is fed with: step after step, this rank's share of the global batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hpctrain.training.data.fetch import Order, find_fetcher
from hpctrain.training.data.loading import Loading
from hpctrain.training.data.order import SampleOrder
from hpctrain.training.data.plan import BatchPlan, Deal, Share
from hpctrain.training.data.randomness import SampleSeeds


@dataclass(frozen=True)
class Until:
    """When a training ends: after so many steps or, if that is None, after so many epochs."""

    steps: int | None
    epochs: int | None = None


class MicroBatch(NamedTuple):
    """As many of a rank's samples as it computes with at once."""

    batch: Any
    num_samples: int
    """Samples in it that count: 0 where the rank has none left and only goes through the motions with one."""


class Step(NamedTuple):
    """What a rank does in one step."""

    share: Share
    num_micro_batches: int
    """The same on all ranks, so that none waits for a forward pass that another does not take."""
    micro_batches: Iterable[MicroBatch]
    """To be gone through once."""


class Feed(Protocol):
    """Where steps come from. All ranks must call every method alike, and at the same point of the loop."""

    micro_batch_size: int | None
    """Samples that a rank computes with at once, at the most; None for all. Set it before `steps`."""
    last_step: int | None
    """The step after which training ends; None where only the end of the data will tell."""
    has_news: bool
    """Whether the ranks have to hear each other's `news` after every step."""
    remarks: Sequence[str]
    """What the user is told at the start, in sentences without a full stop."""

    def identity(self) -> dict[str, Any]:
        """Everything that the order of samples depends on."""

    def state_dict(self) -> dict[str, Any]:
        """The position after the step that was given last: plain values and tensors, equal on all ranks."""

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Put back what `state_dict` returned; sentences for the user about what cannot be put back."""

    def begin(self, after: int) -> None:
        """Make ready to give the step after `after`, the last one that was trained."""

    def steps(self) -> Iterator[Step]:
        """Yield one step after the other, to the end of the training."""

    def close(self) -> None:
        """Let go of workers."""

    def trial(self) -> tuple[int, Any]:
        """The most samples that a rank gets in the next step, and a function that makes a batch of n."""

    def news(self) -> float:
        """What the other ranks have to hear together with the result of the step that was given last."""

    def hear(self, news: float) -> None:
        """Take in the sum of all ranks' `news`, before the step after the next is asked for."""

    @property
    def at_epoch_end(self) -> bool:
        """Whether the step that was given last was its epoch's last; asked after `hear`."""

    @property
    def finished(self) -> bool:
        """Whether the step that was given last was the last of all; asked after `hear`."""


class MapFeed:
    """Feeds from a data set with an index. All that there is to know follows from the number of the step."""

    micro_batch_size: int | None = None
    has_news = False
    remarks: Sequence[str] = ()

    def __init__(
        self, dataset: Any, loading: Loading, deal: Deal, *, seed: int, global_batch_size: int, until: Until
    ) -> None:
        """Look at the data set.

        Raises:
            UserError: it has no length or no samples.
        """
        seeds = SampleSeeds(seed, "training", seed_globals=loading.seed_samples)
        self._fetcher = find_fetcher(dataset, loading.collate_fn, seeds, "train_dataset")
        self._loading, self._deal = loading, deal
        self._plan = BatchPlan(SampleOrder(self._fetcher.num_samples, seed), global_batch_size)
        if global_batch_size > (has := self._fetcher.num_samples):
            # Learning rates and throughput are taken for those of the batch that was asked for.
            remark = f"global_batch_size is {global_batch_size}, but train_dataset has {has} samples: "
            self.remarks = [f"{remark}every step trains all of them"]
        self._last = until.steps or self._plan.steps_per_epoch * (until.epochs or 0)
        self.last_step: int | None = self._last
        self._step = 0
        self._batches: Generator[Any, None, None] | None = None

    def identity(self) -> dict[str, Any]:
        return self._plan.identity()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> list[str]:
        return []

    def begin(self, after: int) -> None:
        self._step = after

    def steps(self) -> Iterator[Step]:
        coming: deque[tuple[Share, list[tuple[int, int]]]] = deque()

        def orders() -> Iterator[Order]:
            for step in range(self._step + 1, self._last + 1):
                share = self._plan.share(step, self._deal)
                parts = share.parts(self.micro_batch_size)
                coming.append((share, parts))
                for low, high in parts:
                    indices = share.indices[low:high] if low < high else self._plan.spare(step)
                    yield share.epoch, indices

        def several(parts: list[tuple[int, int]], first: Any) -> Iterator[MicroBatch]:
            yield MicroBatch(first, parts[0][1] - parts[0][0])
            for low, high in parts[1:]:
                yield MicroBatch(next(batches), high - low)

        self._batches = batches = self._loading.batches(self._fetcher, orders(), "train_dataset")
        for first in batches:
            share, parts = coming.popleft()
            self._step = share.step
            if len(parts) == 1:
                yield Step(share, 1, (MicroBatch(first, parts[0][1]),))
            else:
                yield Step(share, len(parts), several(parts, first))

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def trial(self) -> tuple[int, Any]:
        share = self._plan.share(min(self._step + 1, self._last), self._deal)
        # The largest share of any step, not only of the next one, which may be an epoch's last.
        most = self._deal.largest(min(self._plan.global_batch_size, self._plan.order.num_samples))
        some = share.indices if len(share.indices) else self._plan.spare(share.step)

        def batch_of(count: int) -> Any:
            indices = some.repeat(-(-count // len(some)))[:count]
            return self._fetcher.fetch(share.epoch, indices)

        return most, batch_of

    def news(self) -> float:
        return 0.0

    def hear(self, _news: float) -> None:
        pass

    @property
    def at_epoch_end(self) -> bool:
        return self._step % self._plan.steps_per_epoch == 0

    @property
    def finished(self) -> bool:
        return self._step >= self._last
