"""What follows from the places that ranks tell each other."""

from __future__ import annotations

import pytest

from hpctrain.cluster.gpu_placement import RankPlacement, assign_gpus, check_unique_placement
from hpctrain.errors import HpctrainError


def seats(*gpus_and_index: tuple[str, int | None], host: str = "n1") -> list[RankPlacement]:
    """One node's ranks, each of the UUIDs that it sees (a letter each) and the one that it means to take."""
    return [
        RankPlacement(rank, 0, rank, host, tuple(gpus), index)
        for rank, (gpus, index) in enumerate(gpus_and_index)
    ]


def dealt(seats: list[RankPlacement], **options: bool) -> list[str]:
    deal = assign_gpus(seats, **({"may_share": False} | options))
    return [seat.gpus[deal.indexes[seat.rank]] for seat in seats]


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # As planned, where plans do not collide.
        ([("abcd", 0), ("abcd", 1), ("abcd", 2), ("abcd", 3)], "abcd"),
        ([("abcd", 3), ("abcd", 1)], "db"),
        ([("a", 0), ("b", 0)], "ab"),
        ([("ab", 0), ("cd", 0)], "ac"),
        # --gpu-bind=closest on two sockets; tasks one after the other, and in turn.
        ([("ab", 0), ("ab", 1), ("cd", 0), ("cd", 1)], "abcd"),
        ([("ab", 0), ("cd", 1), ("ab", 0), ("cd", 1)], "adbc"),
        # Sets that overlap: the one that can move makes room.
        ([("ab", 0), ("a", 0)], "ba"),
        ([("abc", 0), ("ab", 0), ("a", 0)], "cba"),
        ([("abc", 0), ("ab", 1), ("ab", 0)], "cba"),
    ],
)
def test_every_rank_gets_a_gpu_of_its_own(seen, expected):
    assert "".join(dealt(seats(*seen))) == expected


def test_nobody_who_means_to_take_a_gpu_alone_has_to_make_room_without_need():
    assert dealt(seats(("abc", 0), ("abc", 0), ("abc", 1))) == ["a", "c", "b"]


def test_two_ranks_on_one_gpu_are_named_with_host_gpu_and_ways_out():
    on_node = seats(("ab", 0), ("ab", 1), ("ab", 1), host="n7")
    with pytest.raises(HpctrainError) as caught:
        assign_gpus(on_node, may_share=False)
    message = str(caught.value)
    assert "rank 1 on n7 and rank 2 on n7 would both use GPU b" in message
    assert "--gpus-per-node=3" in message
    assert "HPCTRAIN_SHARE_GPUS=1" in message


def test_shared_gpus_are_dealt_as_planned_once_none_is_left():
    on_node = seats(("ab", 0), ("ab", 0), ("ab", 0), ("ab", 1))
    deal = assign_gpus(on_node, may_share=True)
    assert deal.shared
    assert set(deal.indexes.values()) == {0, 1}
    assert not assign_gpus(on_node[:2], may_share=True).shared


def test_ranks_on_cpus_are_dealt_nothing():
    deal = assign_gpus(seats(("", None), ("", None)), may_share=False)
    assert (deal.indexes, deal.shared) == ({}, False)


def test_places_of_two_nodes_do_not_collide():
    check_unique_placement(
        [
            RankPlacement(0, 0, 0, "n1"),
            RankPlacement(1, 0, 1, "n1"),
            RankPlacement(2, 1, 0, "n2"),
            RankPlacement(3, 1, 1, "n2"),
        ]
    )


def test_two_launchers_on_one_host_are_two_nodes():
    check_unique_placement([RankPlacement(0, 0, 0, "n1"), RankPlacement(1, 1, 0, "n1")])


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (RankPlacement(1, 0, 0, "n1"), "rank 1 on n1 has local rank 0 on node 0"),
        (RankPlacement(1, 0, 1, "n2"), "rank 1 on n2 has local rank 1 on node 0"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_both_ranks(second, words):
    with pytest.raises(HpctrainError, match=f"rank 0 on n1 has local rank 0 on node 0, and {words}"):
        check_unique_placement([RankPlacement(0, 0, 0, "n1"), second])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_host_without_a_gpu_is_named(order):
    both = [RankPlacement(0, 0, 0, "n1", ("a", "b"), 0), RankPlacement(1, 1, 0, "n2")]
    with pytest.raises(HpctrainError, match="rank 0 on n1 sees 2 GPUs, but rank 1 on n2 sees none"):
        check_unique_placement([both[i] for i in order])


def test_the_problem_of_one_rank_is_told():
    with pytest.raises(HpctrainError, match="rank 1 on n1: too few GPUs"):
        check_unique_placement(
            [RankPlacement(0, 0, 0, "n1"), RankPlacement(1, 0, 1, "n1", problem="too few GPUs")]
        )
