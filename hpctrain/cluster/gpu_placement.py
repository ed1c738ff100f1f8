"""Assignment of GPUs to the ranks of a job, from the placement that each rank reports to the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster.device_plan import SHARE_VARIABLE
from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class RankPlacement:
    """The placement of one rank, as it reports it to the others."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the visible GPUs, in the order of `cuda:N`."""
    index: int | None = None
    """Index of its preferred GPU among them; None for the CPU."""
    problem: str = ""
    """Why it cannot use any GPU."""

    @property
    def gpu(self) -> str | None:
        """UUID of its preferred GPU."""
        return None if self.index is None else self.gpus[self.index]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class GpuAssignment:
    """The GPU of each rank."""

    indexes: dict[int, int]
    """For each rank, the index of its GPU among the visible ones."""
    shared: bool
    """True if two ranks use the same GPU, which NCCL refuses."""


def check_unique_placement(placements: Sequence[RankPlacement]) -> None:
    """Check that no local rank of a node is taken twice, and that either all ranks use GPUs or none does.

    Raises:
        HpctrainError: two ranks contradict each other, or one has a problem; the message names them.
    """
    by_place: dict[tuple[int, int], RankPlacement] = {}
    by_node: dict[int, RankPlacement] = {}
    for placement in placements:
        same_place = by_place.setdefault((placement.node_rank, placement.local_rank), placement)
        same_node = by_node.setdefault(placement.node_rank, placement)
        if same_place is not placement:
            raise _contradiction(same_place, placement)
        if same_node.host != placement.host:
            raise _contradiction(same_node, placement)
        if placement.problem:
            raise HpctrainError(f"{placement}: {placement.problem}")
        if (placement.index is None) != (placements[0].index is None):
            having, lacking = (
                (placements[0], placement) if placement.index is None else (placement, placements[0])
            )
            raise HpctrainError(
                f"{having} sees {len(having.gpus)} GPUs, but {lacking} sees none. Exclude {lacking.host} "
                "(--exclude), or use CPUs on all hosts (set CUDA_VISIBLE_DEVICES to an empty string)."
            )


def assign_gpus(placements: Sequence[RankPlacement], *, may_share: bool) -> GpuAssignment:
    """Assign each rank a visible GPU of its own.

    A rank gets its preferred GPU unless a lower rank prefers the same one. The other ranks get one that is
    left: Slurm may bind the same few GPUs to several tasks (--gpu-bind=closest), and no task can determine
    its own alone.

    Raises:
        HpctrainError: there are too few GPUs and sharing is not allowed; the message names two ranks.
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
        raise _collision(owners[str(sharing[0].gpu)], sharing[0], placements)
    indexes = {placement.rank: placement.index for placement in sharing if placement.index is not None}
    indexes |= {placement.rank: placement.gpus.index(gpu) for gpu, placement in owners.items()}
    return GpuAssignment(indexes, bool(sharing))


def _reassign(placement: RankPlacement, owners: dict[str, RankPlacement], asked: set[str]) -> bool:
    """Assign `placement` a free GPU, or one whose owner can move to another. True if that worked."""
    for gpu in placement.gpus:
        if gpu not in owners:
            owners[gpu] = placement
            return True
    for gpu in placement.gpus:
        if gpu not in asked:
            asked.add(gpu)
            if _reassign(owners[gpu], owners, asked):
                owners[gpu] = placement
                return True
    return False


def _contradiction(one: RankPlacement, other: RankPlacement) -> HpctrainError:
    return HpctrainError(
        f"{one} has local rank {one.local_rank} on node {one.node_rank}, and {other} has local "
        f"rank {other.local_rank} on node {other.node_rank}. `hpctrain env` on each host shows the variables "
        "that set these. Set NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset leftovers of another job."
    )


def _collision(
    one: RankPlacement, other: RankPlacement, placements: Sequence[RankPlacement]
) -> HpctrainError:
    on_host = sum(placement.host == other.host for placement in placements)
    return HpctrainError(
        f"{one} and {other} would both use GPU {other.gpu}. Request one GPU per rank "
        f"(--gpus-per-node={on_host}), start fewer ranks, make all GPUs visible to each rank (srun "
        f"--gpu-bind=none), or set {SHARE_VARIABLE}=1 to let ranks share a GPU."
    )
