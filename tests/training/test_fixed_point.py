"""Sums of gradients as integers: exact, independent of order, and closer to the true sum than float32's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster import detect
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.determinism.fixed_point import (
    HEADROOM,
    exact_norm,
    largest_term,
    scale,
    shared_exponent,
    to_floats,
    truncate,
)

ALONE = DistributedContext(detect({}), torch.device("cpu"), None)


def fixed_point_sum(terms: list[torch.Tensor], exponent: int) -> torch.Tensor:
    total = sum(
        (scale(term, exponent).to(torch.int64) for term in terms),
        torch.zeros(terms[0].shape, dtype=torch.int64),
    )
    return to_floats(total, exponent, torch.float32)


@st.composite
def gradients(draw):
    """Gradients of several grains, from 1e-30 to 1e30, with zeros and outliers."""
    size, num_terms = draw(st.integers(1, 40)), draw(st.integers(1, 200))
    magnitude, spread = draw(st.floats(-30, 29)), draw(st.floats(0, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    powers = magnitude - spread * torch.rand((num_terms, size), generator=generator, dtype=torch.float64)
    terms = torch.randn((num_terms, size), generator=generator, dtype=torch.float64) * 10.0**powers
    terms[torch.rand((num_terms, size), generator=generator) < 0.1] = 0.0
    if draw(st.booleans()):
        terms[0, 0] = 10.0 ** min(30.0, magnitude + draw(st.floats(0, 6)))
    return list(terms.float())


@pytest.mark.slow
@given(gradients(), st.integers(0, HEADROOM), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_sum_is_independent_of_order_and_closer_than_that_of_float32(terms, growth, rng):
    peak = max(float(term.abs().max()) for term in terms)
    exponent = shared_exponent(math.ldexp(peak, -growth), len(terms)) if peak else 0
    assert not peak or peak < largest_term(exponent, len(terms))
    ours, shuffled = fixed_point_sum(terms, exponent), rng.sample(terms, len(terms))
    assert torch.equal(ours, fixed_point_sum(shuffled, exponent))
    true = torch.stack(terms).double().sum(0)
    in_float32 = sum(terms[1:], terms[0])
    distance = (ours.double() - true.float().double()).abs().max()
    # The result itself is a float32 number.
    assert distance <= max(
        (in_float32.double() - true).abs().max(), torch.finfo(torch.float32).eps * true.abs().max()
    )
    bound = len(terms) * 2.0**-exponent if abs(exponent) < 1000 else 0.0
    assert ((ours.double() - true).abs() <= bound + true.abs() * 2.0**-24 + 2.0**-149).all()


def converted_back(x: torch.Tensor, exponent: int) -> torch.Tensor:
    return to_floats(scale(x, exponent).to(torch.int64), exponent, torch.float32)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


@pytest.mark.slow
@given(gradients(), st.integers(0, HEADROOM), st.sampled_from([1.0, 1e-8, 1e-15]))
@settings(deadline=None)
def test_one_or_two_truncated_floats_have_the_bits_of_integers(terms, growth, factor):
    """Subnormal numbers and sums included: the factors and magnitudes go down to 1e-45."""
    x = torch.cat([*terms, terms[0] * 1e-8, torch.tensor([0.0, -0.0, 1e-45, -1e-45])]) * factor
    exponent = shared_exponent(math.ldexp(float(x.abs().max()), -growth), 2)
    in_place, apart = x.clone(), torch.empty_like(x)
    truncate(in_place, exponent, in_place)
    truncate(x, exponent, apart)
    assert bits(in_place) == bits(apart) == bits(converted_back(x, exponent))
    other = x.flip(0) * -0.7
    integers = scale(x, exponent).to(torch.int64) + scale(other, exponent).to(torch.int64)
    floats = truncate(other, exponent, torch.empty_like(x)) + apart
    assert bits(floats) == bits(to_floats(integers, exponent, torch.float32))


@pytest.mark.parametrize("magnitude", [1e-30, 1e-8, 1.0, 1e15])
def test_norm_is_that_of_float64_for_any_division_into_rows(magnitude):
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn((7, 5), generator=generator) * magnitude,
        torch.randn(3, generator=generator) * magnitude / 1e4,
    ]
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in whole]
    for parameter, gradient in zip(parameters, whole, strict=True):
        parameter.grad = gradient
    expected = torch.cat([each.double().flatten() for each in whole]).norm()
    assert float(exact_norm(parameters, ALONE)) == pytest.approx(float(expected), rel=1e-7)
    parameters[1].grad[0] = math.nan
    assert math.isnan(exact_norm(parameters, ALONE))


@pytest.mark.parametrize("size", [1e300, 1e-300])
def test_norm_of_float64_numbers_does_not_overflow(size):
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.full_like(parameter, size)
    assert float(exact_norm([parameter], ALONE)) == 2 * size
