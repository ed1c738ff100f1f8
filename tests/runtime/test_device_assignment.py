"""Device assignment among ranks; without GPUs, the driver is faked."""

import dataclasses
import os
import threading

import pytest
import torch
from helpers.node_ranks import ranks
from torch.distributed import HashStore

from hpctrain.cluster import Ranks
from hpctrain.errors import HpctrainError, RendezvousError
from hpctrain.runtime import rendezvous as module
from hpctrain.runtime.rendezvous import assign_device, choose_device, visible_uuids


def assign_all(
    all_ranks: list[Ranks], environs: list[dict[str, str]]
) -> list[tuple[torch.device, bool] | HpctrainError]:
    """Return each rank's result of `assign_device`, called at the same time."""
    store = HashStore()
    results: dict[int, tuple[torch.device, bool] | HpctrainError] = {}

    def assign(index: int) -> None:
        try:
            results[index] = assign_device(all_ranks[index], environs[index], store)
        except HpctrainError as error:
            results[index] = error

    threads = [threading.Thread(target=assign, args=(index,)) for index in range(len(all_ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [results[index] for index in range(len(all_ranks))]


@pytest.fixture
def fake_driver(monkeypatch):
    """A driver that shows the GPUs in the variable GPUS, a letter each."""
    monkeypatch.setattr(module, "visible_uuids", lambda environ: tuple(environ["GPUS"]))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def gpus(*letters: str, **variables: str) -> list[dict[str, str]]:
    return [{"GPUS": text, "SLURMD_NODENAME": "n1", **variables} for text in letters]


def test_device_without_gpus_is_cpu():
    environs = [{"SLURMD_NODENAME": "n1"}] * 3
    assignments = assign_all([ranks(i, 3) for i in range(3)], environs)
    assert assignments == [(torch.device("cpu"), False)] * 3
    assert choose_device(ranks(0, 3), {}) == torch.device("cpu")


def test_each_rank_takes_the_gpu_of_its_local_rank(fake_driver):
    assignments = assign_all([ranks(i, 3) for i in range(3)], gpus("abc", "abc", "abc"))
    assert assignments == [(torch.device("cuda", i), False) for i in range(3)]
    assert choose_device(ranks(2, 3), *gpus("abc")) == torch.device("cuda", 2)
    assert choose_device(ranks(2, 3), *gpus("abc"), use_gpus=False) == torch.device("cpu")


def test_two_ranks_on_one_gpu_are_reported_on_all_ranks(fake_driver):
    errors = assign_all([ranks(i, 3) for i in range(3)], gpus("a", "b", "a"))
    assert {str(error) for error in errors} == {str(errors[0])}
    parts = ("GPU a: rank 0 on n1 and rank 2 on n1", "--gpus-per-node=3", "HPCTRAIN_SHARE_GPUS=1")
    assert [part for part in parts if part not in str(errors[0])] == []


def test_too_few_gpus_on_one_node_end_all_ranks_at_once(fake_driver):
    of_job = {"world_size": 4, "num_nodes": 2}
    all_ranks = [dataclasses.replace(ranks(0, 1), **of_job)]
    all_ranks += [dataclasses.replace(ranks(i, 3), rank=i + 1, node_rank=1, **of_job) for i in range(3)]
    environs = [*gpus("ab"), *gpus("cd", "cd", "cd", SLURMD_NODENAME="n2")]
    errors = assign_all(all_ranks, environs)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "rank 1 on n2: There are 3 ranks on this node (SLURM_STEP_TASKS_PER_NODE)" in str(errors[0])


@pytest.mark.parametrize("entry", ["x", "0" * 64, "[" * 60_000, "[1]"], ids=len)
@pytest.mark.parametrize("key", ["seats/1", "answer"])
def test_entry_of_another_program_is_refused(key, entry):
    store = HashStore()
    store.set(key, entry)
    with pytest.raises(RendezvousError, match=key):
        assign_device(ranks(1, 2), {"SLURMD_NODENAME": "n1"}, store)


@pytest.mark.gpu
def test_uuids_are_those_of_the_driver():
    from hpctrain.telemetry.sampling.nvml import count_gpus, list_gpu_uuids

    seen = visible_uuids(os.environ)
    assert len(seen) == count_gpus(os.environ)
    assert set(seen) <= set(list_gpu_uuids())


@pytest.mark.gpu
def test_device_is_the_current_one_of_torch():
    assert choose_device(ranks(0, 1), os.environ).index == torch.cuda.current_device()
