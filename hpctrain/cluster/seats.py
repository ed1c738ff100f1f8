"""What the ranks of a job tell each other of their places, and what follows where two collide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.cluster.devices import SHARE_VARIABLE
from hpctrain.errors import HpctrainError


@dataclass(frozen=True)
class Seat:
    """The place of one rank, as it tells its peers."""

    rank: int
    node_rank: int
    local_rank: int
    host: str
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that it sees, in the order in which `cuda:N` counts them."""
    index: int | None = None
    """Which of them it means to take; None for the CPU."""
    problem: str = ""
    """Why it cannot take any."""

    @property
    def gpu(self) -> str | None:
        """UUID of the GPU that it means to take."""
        return None if self.index is None else self.gpus[self.index]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


@dataclass(frozen=True)
class Deal:
    """Who takes which GPU."""

    indexes: dict[int, int]
    """For each rank, the number of its GPU among those that it sees."""
    shared: bool
    """Whether two ranks take the same one, which NCCL refuses."""


def check_places(seats: Sequence[Seat]) -> None:
    """See to it that no place is taken twice, and that all ranks compute on GPUs or none does.

    Raises:
        HpctrainError: naming two ranks that contradict each other, or one that has a problem.
    """
    by_place: dict[tuple[int, int], Seat] = {}
    by_node: dict[int, Seat] = {}
    for seat in seats:
        same_place = by_place.setdefault((seat.node_rank, seat.local_rank), seat)
        same_node = by_node.setdefault(seat.node_rank, seat)
        if same_place is not seat:
            raise _contradiction(same_place, seat)
        if same_node.host != seat.host:
            raise _contradiction(same_node, seat)
        if seat.problem:
            raise HpctrainError(f"{seat}: {seat.problem}")
        if (seat.index is None) != (seats[0].index is None):
            having, lacking = (seats[0], seat) if seat.index is None else (seat, seats[0])
            raise HpctrainError(
                f"{having} sees {len(having.gpus)} GPUs, but {lacking} sees none. Leave {lacking.host} out "
                "(--exclude), or compute on CPUs: set CUDA_VISIBLE_DEVICES to nothing on all hosts."
            )


def deal_gpus(seats: Sequence[Seat], *, may_share: bool) -> Deal:
    """Give each rank a GPU of its own among those that it sees.

    A rank gets the one that it means to take where no lower rank means to take it too. Others get one
    that is left: Slurm may bind the same few GPUs to several tasks (--gpu-bind=closest), and none of
    these can tell alone which is its own.

    Raises:
        HpctrainError: there are not enough for all and they may not be shared; it names two ranks.
    """
    owners: dict[str, Seat] = {}
    for seat in seats:
        if seat.gpu is not None:
            owners.setdefault(seat.gpu, seat)
    waiting = [seat for seat in seats if seat.gpu is not None and owners[seat.gpu] is not seat]
    sharing = [seat for seat in waiting if not _make_room(seat, owners, set())]
    if sharing and not may_share:
        raise _collision(owners[str(sharing[0].gpu)], sharing[0], seats)
    indexes = {seat.rank: seat.index for seat in sharing if seat.index is not None}
    indexes |= {seat.rank: seat.gpus.index(gpu) for gpu, seat in owners.items()}
    return Deal(indexes, bool(sharing))


def _make_room(seat: Seat, owners: dict[str, Seat], asked: set[str]) -> bool:
    """Give `seat` a GPU that nobody has, or whose owner can do with another. Returns whether it got one."""
    for gpu in seat.gpus:
        if gpu not in owners:
            owners[gpu] = seat
            return True
    for gpu in seat.gpus:
        if gpu not in asked:
            asked.add(gpu)
            if _make_room(owners[gpu], owners, asked):
                owners[gpu] = seat
                return True
    return False


def _contradiction(one: Seat, other: Seat) -> HpctrainError:
    return HpctrainError(
        f"{one} takes itself for local rank {one.local_rank} of node {one.node_rank}, and {other} for local "
        f"rank {other.local_rank} of node {other.node_rank}. `hpctrain env` shows on each of them which "
        "variables say so: set NODE_RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset what another job left."
    )


def _collision(one: Seat, other: Seat, seats: Sequence[Seat]) -> HpctrainError:
    on_host = sum(seat.host == other.host for seat in seats)
    return HpctrainError(
        f"{one} and {other} would both compute on GPU {other.gpu}. Ask for a GPU a rank "
        f"(--gpus-per-node={on_host}), start fewer ranks, show all GPUs to each of them (srun "
        f"--gpu-bind=none), or set {SHARE_VARIABLE}=1 to let ranks share a GPU."
    )
