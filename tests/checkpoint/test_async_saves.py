"""Saves in the background: staging, waiting, outcomes and abandoning."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.commands import environment
from helpers.saved_states import names, steps

from hpctrain.checkpoint.io import background_io
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave
from hpctrain.errors import CheckpointError


class Gate:
    """Block all writing until it is opened or the save is stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        write = background_io.FileWriter._write

        def wait_and_write(writing, part):
            self.reached.set()
            while not (self.open.is_set() or writing.stop.is_set()):
                self.open.wait(0.01)
                writing.last_progress = time.monotonic()
            return write(writing, part)

        monkeypatch.setattr(background_io.FileWriter, "_write", wait_and_write)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def test_async_save_stores_state_at_the_call(tmp_path, gate):
    store = CheckpointStore(tmp_path)
    state = {"x": torch.arange(1000.0), "log": [1, 2], "scheduler": {"milestones": {"a": 1}}}
    store.async_save(1, state, {"rng": state["x"]})
    state["x"].zero_()
    state["log"].append(3)
    state["scheduler"]["milestones"].clear()
    gate.open.set()
    assert store.wait(120)
    loaded = store.load_newest()[0]
    assert torch.equal(loaded.state["x"], torch.arange(1000.0))
    assert torch.equal(loaded.rank_state["rng"], torch.arange(1000.0))
    assert loaded.state["log"] == [1, 2]
    assert loaded.state["scheduler"] == {"milestones": {"a": 1}}


def test_second_async_save_waits_for_the_first(tmp_path, gate):
    store = CheckpointStore(tmp_path)
    store.async_save(1, {"x": torch.zeros(2)}, {})
    second = threading.Thread(target=store.async_save, args=(2, {"x": torch.ones(2)}, {}))
    second.start()
    gate.reached.wait(120)
    second.join(0.2)
    assert second.is_alive()
    assert steps(tmp_path) == []
    gate.open.set()
    second.join(10)
    assert store.wait(120)
    assert [saved.step for saved in store.collect_outcomes()] == [1, 2]
    assert store.collect_outcomes() == []
    assert torch.equal(store.load_newest()[0].state["x"], torch.ones(2))


def test_staging_memory_is_reused_for_states_of_other_lengths(tmp_path):
    """The random state is a string whose length varies; new memory would stall training."""
    store = CheckpointStore(tmp_path)
    memories = []
    for step, (length, rng_length) in enumerate(((9, 70), (1000, 80), (9, 60)), 1):
        store.async_save(step, {"x": torch.ones(length), "y": torch.ones(3)}, {"rng": torch.ones(rng_length)})
        memories.append(store._stager._memory)
    loaded = store.load_newest()[0]
    store.close()
    assert memories[0] is memories[1] is memories[2]
    assert torch.equal(loaded.state["x"], torch.ones(9))
    assert torch.equal(loaded.state["y"], torch.ones(3))
    assert torch.equal(loaded.rank_state["rng"], torch.ones(60))


def test_abandoned_save_fails_and_leaves_no_files(tmp_path, gate):
    store = CheckpointStore(tmp_path)
    store.async_save(1, {"x": torch.zeros(2)}, {})
    gate.reached.wait(120)
    store.abandon()
    assert store.wait(120)
    (error,) = store.collect_outcomes()
    assert isinstance(error, CheckpointError)
    assert "was aborted" in str(error)
    assert names(tmp_path) == []
    gate.open.set()
    assert isinstance(store.save(2, {"x": torch.zeros(2)}, {}), CommittedSave)


def test_close_waits_for_save_and_abandons_it_after_timeout(tmp_path, gate):
    store = CheckpointStore(tmp_path)
    store.async_save(1, {"x": torch.zeros(2)}, {})
    assert store.close(timeout_s=0.1) == []
    assert "was aborted" in str(store.collect_outcomes()[0])
    gate.open.set()
    other = CheckpointStore(tmp_path)
    other.async_save(2, {"x": torch.zeros(2)}, {})
    other.close()
    assert steps(tmp_path) == [2]


@pytest.mark.extended
@pytest.mark.ranks
def test_process_exit_without_close_abandons_save_and_keeps_exit_code(tmp_path):
    """For example, an error of the script while a save is in flight."""
    script = f"""if True:
        import sys, time, torch
        from pathlib import Path
        from hpctrain.checkpoint.io import background_io as parts
        from hpctrain.checkpoint.store import CheckpointStore
        store = CheckpointStore(Path({str(tmp_path)!r}))
        def endless(writing, part):
            while not writing.stop.is_set():
                writing.last_progress = time.monotonic()
                time.sleep(0.01)
            raise OSError("stopped")
        parts.FileWriter._write = endless
        store.async_save(1, {{"x": torch.zeros(2)}}, {{}})
        sys.exit(3)
    """
    process = subprocess.Popen([sys.executable, "-c", script], env=environment())
    try:
        assert process.wait(120) == 3
    finally:
        process.kill()
        process.wait()
    assert names(tmp_path) == []


@pytest.mark.gpu
def test_gpu_tensors_are_copied_in_stream_order(tmp_path):
    store = CheckpointStore(tmp_path)
    x = torch.arange(64.0 * 1024 * 1024, device="cuda").reshape(64, 1024, 1024)
    state = {"x": x, "bf16": x[0].bfloat16(), "cpu": torch.ones(3), "view": x[0].t()}
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    for step in (1, 2):
        store.async_save(step, state, {})
        x.add_(1.0)  # at once: the copy must not include it
        assert store.wait(120)
        loaded = store.load_newest()[0].state
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
        expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    assert torch.frombuffer(store._stager._staged_file.content.obj, dtype=torch.uint8).is_pinned()
