"""GPU assignment and conflicts, from the placements that ranks exchange."""

import pytest

from hpctrain.cluster.gpu_assignment import RankPlacement, assign_gpus, check_unique_placement
from hpctrain.errors import HpctrainError


def placements(*gpus_and_index: tuple[str, int | None]) -> list[RankPlacement]:
    """Return one node's ranks, each with its visible GPUs (a letter each) and its planned index."""
    return [
        RankPlacement(rank, 0, rank, "n1", tuple(gpus), index)
        for rank, (gpus, index) in enumerate(gpus_and_index)
    ]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        # As planned, if the plans do not collide.
        ([("abcd", 0), ("abcd", 1), ("abcd", 2), ("abcd", 3)], "abcd"),
        ([("abcd", 3), ("abcd", 1)], "db"),
        ([("a", 0), ("b", 0)], "ab"),
        ([("ab", 0), ("cd", 0)], "ac"),
        # --gpu-bind=closest on two sockets; tasks consecutive, and alternating.
        ([("ab", 0), ("ab", 1), ("cd", 0), ("cd", 1)], "abcd"),
        ([("ab", 0), ("cd", 1), ("ab", 0), ("cd", 1)], "adbc"),
        # Overlapping sets: the rank with a choice yields.
        ([("ab", 0), ("a", 0)], "ba"),
        ([("abc", 0), ("ab", 0), ("a", 0)], "cba"),
        ([("abc", 0), ("ab", 1), ("ab", 0)], "cba"),
    ],
)
def test_every_rank_gets_its_own_gpu(visible, expected):
    on_node = placements(*visible)
    indexes, _ = assign_gpus(on_node, may_share=False)
    assert "".join(placement.gpus[indexes[placement.rank]] for placement in on_node) == expected


def test_shared_gpus_are_assigned_as_planned():
    on_node = placements(("ab", 0), ("ab", 0), ("ab", 0), ("ab", 1))
    indexes, shared = assign_gpus(on_node, may_share=True)
    assert shared
    assert set(indexes.values()) == {0, 1}
    assert not assign_gpus(on_node[:2], may_share=True)[1]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (RankPlacement(1, 0, 0, "n1"), "rank 1 on n1 has local rank 0 on node 0"),
        (RankPlacement(1, 0, 1, "n2"), "rank 1 on n2 has local rank 1 on node 0"),
    ],
)
def test_impossible_placement_is_refused_with_both_ranks(second, message):
    with pytest.raises(HpctrainError, match=f"rank 0 on n1 has local rank 0 on node 0, and {message}"):
        check_unique_placement([RankPlacement(0, 0, 0, "n1"), second])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_single_host_without_gpus_is_reported(order):
    both = [RankPlacement(0, 0, 0, "n1", ("a", "b"), 0), RankPlacement(1, 1, 0, "n2")]
    with pytest.raises(HpctrainError, match="GPUs are visible to rank 0 on n1, but not to rank 1 on n2"):
        check_unique_placement([both[i] for i in order])
