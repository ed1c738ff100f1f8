"""Ranks as threads that use a step source like the training loop does."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.step_source import StepSource

_LIMIT_S = 30.0


class SimulatedGroup:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=_LIMIT_S)
        self._values: list[Any] = [None] * world_size

    def of(self, rank: int) -> "_Member":
        return _Member(self, rank)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@dataclass
class _Member:
    team: SimulatedGroup
    rank: int
    collectives: int = 0

    @property
    def ranks(self) -> SimpleNamespace:
        return SimpleNamespace(rank=self.rank, world_size=self.team.world_size)

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        self.collectives += 1
        return self.team.gather(self.rank, value)

    def broadcast(self, value: Any, src: int, what: str = "") -> Any:
        return self.all_gather(value)[src]


#: A group of one, for tests of a single rank.
ALONE = SimulatedGroup(1).of(0)


@dataclass
class TrainedSteps:
    """The steps that some ranks trained from one start to the stop."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """One dict per step: step, epoch and batch index, each rank's samples, and the number of collectives."""
    state: dict[str, Any] | None = None
    finished: bool = False
    remarks: list[str] = field(default_factory=list)


MakeFeed = Callable[[DataRank, Any], StepSource]


def train_steps(
    make_source: MakeFeed,
    world_size: int,
    num_steps: int,
    *,
    after: int = 0,
    state: dict[str, Any] | None = None,
    micro_batch_size: int | None = None,
) -> TrainedSteps:
    group = SimulatedGroup(world_size)

    def train(rank: int) -> tuple[list[dict[str, Any]], dict[str, Any], bool, list[str]]:
        member = group.of(rank)
        source = make_source(DataRank(rank, world_size), member)
        source.micro_batch_size = micro_batch_size
        remarks = source.load_state_dict(state) if state is not None else []
        source.begin(after)
        steps: list[dict[str, Any]] = []
        pending: float | None = None
        finished = source.finished
        try:
            for step in source.steps() if num_steps else ():
                micro = [(m.num_samples, m.batch) for m in step.micro_batches]
                assert len(micro) == step.num_micro_batches
                steps.append({"share": step.rank_batch, "micro": micro})
                before = member.collectives
                if pending is not None:
                    source.receive_ends(sum(group.gather(rank, pending)))
                steps[-1]["collectives"] = member.collectives - before
                steps[-1]["ends_epoch"] = source.at_epoch_end
                finished = source.finished
                pending = source.local_ends()
                if len(steps) == num_steps or finished:
                    source.receive_ends(sum(group.gather(rank, pending)))
                    break
            return steps, source.state_dict(), finished, remarks
        finally:
            source.close()

    with ThreadPoolExecutor(world_size) as pool:
        results = [future.result() for future in [pool.submit(train, r) for r in range(world_size)]]
    trained = TrainedSteps(state=results[0][1], finished=results[0][2], remarks=results[0][3])
    for rank_steps in zip(*(told for told, *_ in results), strict=True):
        shares = [entry["share"] for entry in rank_steps]
        assert len({(s.step, s.epoch, s.batch_idx, s.batch_size, s.largest) for s in shares}) == 1
        assert len({len(entry["micro"]) for entry in rank_steps}) == 1
        assert shares[0].batch_size == sum(len(s.indices) for s in shares)
        assert shares[0].largest == max(len(s.indices) for s in shares)
        trained.steps.append(
            {
                "step": shares[0].step,
                "epoch": shares[0].epoch,
                "batch_idx": shares[0].batch_idx,
                "ends_epoch": rank_steps[0]["ends_epoch"],
                "indices": [s.indices.tolist() for s in shares],
                "micro": [entry["micro"] for entry in rank_steps],
                "collectives": rank_steps[0]["collectives"],
            }
        )
    return trained
