"""Loader workers: signals, death with their rank, and reported failures."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.commands import environment
from helpers.waiting import slowness, wait_for
from torch.utils.data import DataLoader, Dataset

import hpctrain
from hpctrain.errors import DataWorkerKilled
from hpctrain.training.data import loader_workers
from hpctrain.training.data.fetcher import make_fetcher
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.loader_workers import load_batches
from hpctrain.training.data.sample_seeds import SampleSeeds


class Numbers(Dataset):
    """Numbers, and an action when one of them is fetched."""

    def __init__(self, action=None, at: int = 7, length: int = 40) -> None:
        self.action, self.at, self.length = action, at, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.at and self.action is not None:
            self.action()
        return index


def batches(dataset, num_workers=2, timeout_s=60.0, size=4):
    fetcher = make_fetcher(dataset, None, SampleSeeds(0, "training"), "train_dataset")
    orders = ((3, torch.arange(i, i + size)) for i in range(0, len(dataset), size))
    loading = LoaderConfig(num_workers=num_workers, timeout_s=timeout_s)
    return load_batches(loading, fetcher, orders, "train_dataset")


class Noise(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def noise_of_rank(rank: int) -> list[float]:
    torch.manual_seed(rank)
    fetcher = make_fetcher(Noise(), list, SampleSeeds(0, "training", seed_globals=False), "train_dataset")
    loading = LoaderConfig(num_workers=1, seed_samples=False)
    (batch,) = load_batches(loading, fetcher, iter([(0, torch.arange(2))]), "train_dataset")
    return batch


@pytest.mark.slow
def test_workers_of_two_ranks_have_different_random_numbers_without_seeds_for_each_sample():
    first, again, second = noise_of_rank(0), noise_of_rank(0), noise_of_rank(1)
    assert first == again
    assert set(first).isdisjoint(second)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise KeyError("no such picture")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_error_names_sample_and_epoch(num_workers):
    with pytest.raises(KeyError) as caught:
        list(batches(Numbers(fail), num_workers))
    error_text = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "no such picture" in error_text
    assert "This error was raised while fetching sample 7 of train_dataset in epoch 3" in error_text
    if num_workers:
        assert "in fail" in error_text  # the traceback of the worker


@pytest.mark.slow
def test_dead_worker_is_reported_with_its_sample():
    start = time.monotonic()
    message = r"Data worker 1 \(pid \d+\) was killed by SIGKILL at sample 7 of train_dataset, epoch 3.*memory"
    with pytest.raises(hpctrain.HpctrainError, match=message):
        list(batches(Numbers(kill_self)))
    assert time.monotonic() - start < 100 * slowness()


@pytest.mark.slow
def test_killed_worker_interrupts_only_the_fetch_of_a_batch():
    """Another DataLoader has installed torch's signal handler, which raises anywhere in the main thread."""
    list(DataLoader(Numbers(length=2), num_workers=1))
    with closing(batches(Numbers(kill_self))) as loaded:
        next(loaded)
        wait_for(lambda: len(multiprocessing.active_children()) < 2, 60, "the kill")
        with pytest.raises(DataWorkerKilled):
            list(loaded)


@pytest.mark.slow
def test_stuck_worker_is_abandoned_after_the_limit(monkeypatch):
    monkeypatch.setattr(loader_workers, "_POLL_INTERVAL_S", 0.2)
    start = time.monotonic()
    with pytest.raises(
        hpctrain.HpctrainError,
        match=r"within 0.5 s \(dataloader_timeout_s\)(.|\n)*sample 7 of train_dataset, epoch 3",
    ):
        list(batches(Numbers(lambda: time.sleep(300)), timeout_s=0.5))
    assert time.monotonic() - start < 100 * slowness()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_signal_at_birth_does_not_kill_a_worker(number):
    """The signal arrives between the fork and the worker's first instruction: the fork itself sends it."""

    def signal_self():
        os.kill(os.getpid(), number)

    armed = [True]
    os.register_at_fork(after_in_child=lambda: armed[0] and signal_self())
    try:
        assert torch.cat(list(batches(Numbers()))).tolist() == list(range(40))
    finally:
        armed[0] = False


def start_rank(code: str) -> subprocess.Popen:
    """Start a rank with a worker that does not return a sample."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_loader_workers import Numbers, batches
loaded = batches(Numbers(lambda: time.sleep(300), at=39))
{code}
"""
    env = environment({"PYTHONPATH": os.pathsep.join(sys.path)})
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.ranks
def test_workers_ignore_job_signals_and_die_with_their_rank():
    with start_rank("for _ in range(9): next(loaded)\nprint('ready', flush=True)\nnext(loaded)") as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        children_text = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text()
        children = [int(pid) for pid in children_text.split()]
        assert len(children) == 2
        for number in (signal.SIGTERM, signal.SIGUSR2):
            for pid in children:
                os.kill(pid, number)
        time.sleep(0.3)
        assert all(Path(f"/proc/{pid}/stat").exists() for pid in children)
        rank.kill()
        rank.wait()
        wait_for(lambda: not any(_is_alive(pid) for pid in children), 2, "the workers to go with their rank")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.extended
@pytest.mark.ranks
def test_failed_rank_does_not_wait_for_its_workers():
    with start_rank("next(loaded)\nkeep = [loaded]\nraise SystemExit(3)") as rank:
        assert rank.wait(120) == 3


def test_programs_of_a_data_worker_receive_signals():
    def stop_program():
        with subprocess.Popen(["sleep", "60"]) as program:
            try:
                for number in (signal.SIGTERM, signal.SIGINT):
                    program.send_signal(number)
                assert program.wait(10) in (-signal.SIGTERM, -signal.SIGINT)
            finally:
                program.kill()

    assert len(list(batches(Numbers(stop_program), num_workers=1))) == 10
