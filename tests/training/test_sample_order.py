import time

import torch
from helpers.waiting import slowness
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.training.data.batch_plan import split_range
from hpctrain.training.data.sample_order import SampleOrder


@given(st.integers(1, 5000), st.integers(-(2**40), 2**40), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(num_samples, seed, epoch):
    order = SampleOrder(num_samples, seed).indices(epoch, 0, num_samples)
    assert sorted(order.tolist()) == list(range(num_samples))


@given(st.integers(1, 20_000), st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_equals_that_range_of_the_whole_order(num_samples, data):
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    order = SampleOrder(num_samples, 7)
    assert order.indices(3, start, stop).tolist() == order.indices(3, 0, num_samples)[start:stop].tolist()


def test_epochs_and_seeds_differ():
    orders = {
        tuple(SampleOrder(50, seed).indices(epoch, 0, 50).tolist()) for seed in range(3) for epoch in range(3)
    }
    assert len(orders) == 9


def test_order_is_the_same_on_every_machine_and_version():
    assert SampleOrder(10, 1).indices(0, 0, 10).tolist() == [6, 8, 0, 3, 4, 7, 2, 9, 1, 5]


def test_positions_and_neighbours_of_a_large_dataset_are_uniform():
    """Positions among a billion samples, and their successors, in a grid of 32 × 32 cells each."""
    size, part, cells = 10**9, 40_000, 32
    order = SampleOrder(size, 11)
    for epoch, start in [(0, 0), (3, 777_777_777), (4, size - part)]:
        drawn = order.indices(epoch, start, start + part)
        sample_cells = torch.div(drawn * cells, size, rounding_mode="floor")
        position_cells = torch.arange(part) * cells // part
        grids = {
            "sample by position": position_cells * cells + sample_cells,
            "sample by the one before": sample_cells[:-1] * cells + sample_cells[1:],
            "distance of neighbours": ((drawn[1:] - drawn[:-1]) % size) * cells**2 // size,
            "last bits of neighbours": (drawn[:-1] % cells) * cells + drawn[1:] % cells,
        }
        for name, cell in grids.items():
            counts = cell.bincount(minlength=cells**2).tolist()
            assert chi_square(counts, len(cell), cells**2) < upper_limit(cells**2 - 1), name


def chi_square(counts, total, cells):
    expected = total / cells
    return sum((count - expected) ** 2 / expected for count in counts)


def upper_limit(degrees):
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_huge_dataset_starts_at_once():
    start = time.perf_counter()
    order = SampleOrder(10**12, 1)
    assert len(set(order.indices(5, 10**12 - 100, 10**12).tolist())) == 100
    assert time.perf_counter() - start < 30 * slowness()


@given(st.integers(0, 1000), st.integers(1, 64))
def test_ranges_of_ranks_cover_everything_once(count, world_size):
    ranges = [split_range(count, rank, world_size) for rank in range(world_size)]
    assert [i for low, high in ranges for i in range(low, high)] == list(range(count))
    sizes = [high - low for low, high in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)
