"""Assign GPUs to the ranks of a job, based on the reported placement of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster.device_plan import SHARE_VARIABLE
from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a rank, as reported to the others."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the visible GPUs, in the order of `cuda:N`."""
    index: int | None = None
    """Index of the preferred GPU among them; None for the CPU."""
    problem: str = ""
    world_size: int = 0

    @property
    def gpu(self) -> str | None:
        return None if self.index is None else self.gpus[self.index]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def check_unique_placement(placements: Sequence[RankPlacement]) -> None:
    """Check that the local ranks of each node are unique, and that either all ranks use GPUs or none."""
    by_place: dict[tuple[int, int], RankPlacement] = {}
    by_node: dict[int, RankPlacement] = {}
    for placement in placements:
        same_place = by_place.setdefault((placement.node_rank, placement.local_rank), placement)
        same_node = by_node.setdefault(placement.node_rank, placement)
        if placement.world_size != placements[0].world_size:
            raise HpctrainError(
                f"The world size is {placement.world_size} on {placement}, but {placements[0].world_size} on "
                f"{placements[0]}. To see the values of each process, run `hpctrain env` with the same "
                "launcher."
            )
        if same_place is not placement:
            raise _contradiction(same_place, placement)
        if same_node.host != placement.host:
            raise _contradiction(same_node, placement)
        if placement.problem:
            raise HpctrainError(f"{placement}: {placement.problem}")
        if (placement.index is None) != (placements[0].index is None):
            both = (placements[0], placement)
            having, lacking = sorted(both, key=lambda rank: rank.index is None)
            raise HpctrainError(
                f"GPUs are visible to {having}, but not to {lacking}. Exclude {lacking.host} "
                "(--exclude), or use CPUs on all hosts (set CUDA_VISIBLE_DEVICES to an empty string)."
            )


def assign_gpus(placements: Sequence[RankPlacement], *, may_share: bool) -> tuple[dict[int, int], bool]:
    """Assign a separate GPU to each rank: its preferred one, unless a lower rank prefers the same.

    Returns the index of each rank's GPU among its visible ones, and true if two ranks share a GPU, which NCCL
    does not support.
    """
    owners: dict[str, RankPlacement] = {}
    for placement in placements:
        if placement.gpu is not None:
            owners.setdefault(placement.gpu, placement)
    waiting = [
        placement
        for placement in placements
        if placement.gpu is not None and owners[placement.gpu] is not placement
    ]
    sharing = [placement for placement in waiting if not _reassign(placement, owners, set())]
    if sharing and not may_share:
        rival = sharing[0]
        on_host = sum(placement.host == rival.host for placement in placements)
        raise HpctrainError(
            f"Two ranks would use GPU {rival.gpu}: {owners[str(rival.gpu)]} and {rival}. Request one GPU per "
            f"rank (--gpus-per-node={on_host}), start fewer ranks, make all GPUs visible to each rank (srun "
            f"--gpu-bind=none), or set {SHARE_VARIABLE}=1 to let ranks share a GPU."
        )
    indexes = {placement.rank: placement.index for placement in sharing if placement.index is not None}
    indexes |= {placement.rank: placement.gpus.index(gpu) for gpu, placement in owners.items()}
    return indexes, bool(sharing)


def _reassign(placement: RankPlacement, owners: dict[str, RankPlacement], tried: set[str]) -> bool:
    """Assign a free GPU to `placement`, if necessary by moving another rank. Return true on success."""
    for gpu in placement.gpus:
        if gpu not in owners:
            owners[gpu] = placement
            return True
    for gpu in placement.gpus:
        if gpu not in tried:
            tried.add(gpu)
            if _reassign(owners[gpu], owners, tried):
                owners[gpu] = placement
                return True
    return False


def _contradiction(earlier: RankPlacement, later: RankPlacement) -> HpctrainError:
    places = ", and ".join(
        f"{placement} has local rank {placement.local_rank} on node {placement.node_rank}"
        for placement in (earlier, later)
    )
    return HpctrainError(
        f"Two ranks contradict each other: {places}. Run `hpctrain env` on each host to show the variables "
        "that set these values. Set NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset variables left over "
        "from another job."
    )
