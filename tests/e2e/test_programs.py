"""Modules and commands are runs like scripts, and their hangs are detected without a Trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.commands import run_command

from hpctrain.rundir import RunDir

MODULE = """
import os, sys
from .place import PLACE
print(PLACE, "rank", os.environ["RANK"], sys.argv[1:], flush=True)
sys.exit(int(os.environ.get("FAIL_WITH", "0")))
"""
#: Two ranks that meet at each step. Rank 1 of the first attempt sleeps in the step of that number.
TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
def pause_here():
    time.sleep(1000)
for step in range(40):
    if step == int(sys.argv[1]) and os.environ["RANK"] == "1" and os.environ["HPCTRAIN_ATTEMPT"] == "0":
        pause_here()
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)
os._exit(0)
"""


@pytest.fixture
def workdir(tmp_path) -> Path:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "place.py").write_text('PLACE = "in the package"\n')
    (package / "main.py").write_text(MODULE)
    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "run.sh").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


def submit(workdir: Path, *words: str, **variables: str) -> tuple[RunDir, int, str]:
    options = ["--backend=local", "--ntasks-per-node=2", "--run-dir=run", "--standby-workers=never"]
    hpctrain = [sys.executable, "-m", "hpctrain", "submit", *options, "--follow", *words]
    done = run_command(hpctrain, variables, cwd=workdir, check=False, timeout=100)
    return RunDir(workdir / "run"), done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "package.main"],
        ["--", sys.executable, "-m", "package.main"],
        ["--", "./run.sh", "-m", "package.main"],
        ["--", "sh", "-c", f'exec {sys.executable} -m package.main "$@"', "sh"],
    ],
    ids=["module", "python", "shell script", "shell"],
)
def test_module_and_commands_run_with_their_arguments(workdir, program):
    run, code, printed = submit(workdir, *program, "--lr", "1 2")
    assert code == 0
    for rank in (0, 1):
        assert f"in the package rank {rank} ['--lr', '1 2']" in run.rank_log(0, rank).read_text()
    assert "COMPLETED" in printed


@pytest.mark.parametrize("program", [["-m", "package.main"], ["--", "./run.sh", "-m", "package.main"]])
def test_exit_code_of_a_program_is_a_failure(workdir, program):
    _, code, printed = submit(workdir, "--max-failures=1", *program, FAIL_WITH="3")
    assert code != 0
    assert "exit code 3" in printed or "sys.exit(3)" in printed


@pytest.mark.parametrize(
    ("program", "step", "place"),
    [
        (["train.py"], "0", "pause_here (train.py:"),
        (["train.py"], "20", "pause_here (train.py:"),
        (["--", sys.executable, "train.py"], "20", "pause_here (train.py:"),
    ],
    ids=["before the first step", "between steps", "command"],
)
def test_rank_that_sleeps_in_a_plain_script_is_named_and_the_run_restarted(workdir, program, step, place):
    run, code, printed = submit(workdir, "--hang-timeout=2", *program, step)
    assert code == 0, printed
    causes = [event["cause"] for event in run.read_events() if event["kind"] == "failure"]
    assert len(causes) == 1
    assert causes[0].startswith("hung: ")
    assert "; rank 1 on " in causes[0]
    assert place in causes[0]
    assert "trained" in run.rank_log(1, 0).read_text()
