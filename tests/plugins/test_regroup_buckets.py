"""Gradients are added in the same order by a process that resumes."""

import pytest
import torch
from helpers.ranks import run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_with_blocks import Net

from hpctrain.training.strategies.ddp import regroup_buckets

pytestmark = pytest.mark.ranks


def gradients_of_first_and_second_step(regroups: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(1)
    net = Net(nn.Linear(64, 1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(1, 64))
    model = DistributedDataParallel(net)
    if regroups:
        regroup_buckets(model)
        assert all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(torch.distributed.get_rank())
    inputs = torch.randn(8, 1)
    steps = []
    for _ in range(2):
        model.zero_grad()
        model(inputs).pow(2).mean().backward()
        steps.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).tolist())
    return steps[0], steps[1]


def test_both_steps_are_equal_after_regrouping_only():
    for first, second in run_on_ranks(gradients_of_first_and_second_step, True, world_size=4):
        assert first == second
    first, second = run_on_ranks(gradients_of_first_and_second_step, False, world_size=4)[0]
    assert first != second


def replaced_forward_is_kept() -> bool:
    """Accelerate assigns a forward pass with autocast to the module."""
    net = nn.Linear(2, 2)
    net.forward = lambda x: x * 0 + sum(p.sum() for p in net.parameters()) * 0 + 7.0
    model = DistributedDataParallel(net)
    regroup_buckets(model)
    return bool((model(torch.ones(2)) == 7.0).all())


def test_forward_of_the_instance_remains():
    assert run_on_ranks(replaced_forward_is_kept) == [True, True]
