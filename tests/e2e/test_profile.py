"""Profiles of running programs without the Trainer."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

#: Ranks with equal data, so the weights are those of a single process. Each step is recorded. Rank 1 may
#: use a profiler itself. A file ends the training.
TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.profiler import profile
dist.init_process_group("gloo")
rank, run, step = os.environ["RANK"], os.environ["HPCTRAIN_RUN_DIR"], 0
torch.manual_seed(1)
layer = torch.nn.Linear(8, 8)
model = torch.nn.parallel.DistributedDataParallel(layer)
optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(2)
profiler = profile() if rank == "1" and "profile" in sys.argv else None
if profiler:
    profiler.start()
while not os.path.exists(f"{run}/last") or step < int(open(f"{run}/last").read()):
    time.sleep(0.02)
    model(torch.randn(4, 8, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    with open(f"{run}/weights-{rank}", "a") as file:
        print(layer.weight.sum().item().hex(), file=file)
if profiler:
    profiler.stop()
    print("own profile", len(profiler.events()) > 1000)
"""


def weights(run: Run, rank: int) -> list[str]:
    return (run.path / f"weights-{rank}").read_text().split()


def reference_weights(num_steps: int) -> list[str]:
    """Return the sum of the weights after each step of an undisturbed training."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    generator, sums = torch.Generator().manual_seed(2), []
    for _ in range(num_steps):
        layer(torch.randn(4, 8, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sums.append(layer.weight.sum().item().hex())
    return sums


def profile(run: Run, *options: str, code: int = 0) -> tuple[str, str]:
    result = run.hpctrain("profile", str(run.path), *options, check=False)
    assert result.returncode == code, result.stdout + result.stderr + run.describe()
    return result.stdout, result.stderr


def trace_names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event.get("name") for event in json.load(file)["traceEvents"]]


@pytest.mark.extended
def test_profile_of_a_running_script_does_not_change_its_result(tmp_path):
    options = ["--backend=local", "--ntasks-per-node=2", "--standby-workers=never"]
    run = submit_script(tmp_path, TRAINING, "profile", options=options, env={"OMP_NUM_THREADS": "1"})
    wait_for(lambda: run.status()["step"], 60, "the first step")
    printed, messages = profile(run, "--ranks=0,1", "--steps=3", code=1)
    assert messages.startswith("Waiting for ")
    assert not run.dir.profile_request.exists()
    trace = run.dir.profile_trace(0, 0)
    assert trace_names(trace).count("aten::addmm") == 3
    assert f"trace  {trace}" in printed
    assert "Optimizer.step#Adam.step" in printed
    assert "rank 1: RuntimeError: the script is already using a PyTorch profiler" in messages
    # A run may also end during a profile.
    _, messages = profile(run, "--steps=100000", "--timeout=2", code=1)
    assert "after 2 s: waiting for rank 0 to complete 100" in messages
    _, messages = profile(run, "--ranks=1-2", code=2)
    assert "has no rank 2 (--ranks)" in messages
    # End the training after a few steps.
    (run.path / "last.tmp").write_text(str(len(weights(run, 0)) + 50))
    (run.path / "last.tmp").rename(run.path / "last")
    assert run.wait() == 0
    assert run.events("failure") == []
    assert weights(run, 0) == weights(run, 1) == reference_weights(len(weights(run, 0)))
    assert "own profile True" in run.dir.rank_log(0, 1).read_text()
    assert "the program ended after" in json.loads(run.dir.profile_result(1, 0).read_text())["error"]
    _, messages = profile(run, code=2)
    assert "is COMPLETED. Only a run that is RUNNING can be profiled" in messages
