"""Release of the devices of a stopped rank: first its work, then its communicators."""

import threading

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

from hpctrain.runtime import release_devices as module
from hpctrain.runtime.release_devices import release_devices, release_devices_within

pytestmark = pytest.mark.ranks


def release_during_an_exchange(as_older_torch: bool) -> list[object]:
    calls: list[object] = []
    if as_older_torch:
        module._NAMES_THREADS = module._CAN_FREE_GROUPS = "99.0"
    torch.cuda.is_initialized, torch.cuda.device_count = (lambda: True), (lambda: 2)
    torch._C._cuda_hasPrimaryContext = lambda device: device == 1
    torch.cuda.synchronize = lambda device: calls.append((device, dist.is_initialized()))
    dist.all_reduce(torch.ones(100_000), async_op=True)
    release_devices()
    return [*calls, dist.is_initialized()]


@pytest.mark.parametrize("as_older_torch", [False, True])
def test_work_of_the_used_devices_completes_before_the_communicators_are_destroyed(as_older_torch):
    assert run_on_ranks(release_during_an_exchange, as_older_torch) == [[(1, True), False]] * 2


def test_communicators_of_a_blocked_device_are_kept_and_the_rank_goes_on(monkeypatch):
    blocked, destroyed = threading.Event(), []
    monkeypatch.setattr(torch.cuda, "is_initialized", blocked.wait)
    monkeypatch.setattr(module, "shut_down_process_group", lambda limit_s: destroyed.append(limit_s))
    release_devices_within(0.1)
    assert not destroyed
    blocked.set()


@pytest.mark.gpu
def test_nccl_exchange_completes_before_its_communicator_is_destroyed():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    values = torch.ones(1 << 26, device="cuda")
    for _ in range(20):
        dist.all_reduce(values, async_op=True)
    release_devices()
    assert torch.cuda.current_stream().query()
    assert not dist.is_initialized()
