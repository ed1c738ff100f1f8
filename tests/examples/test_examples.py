"""The examples run unmodified: alone, under torchrun, and as a run of hpctrain."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.waiting import wait_for

EXAMPLES = REPOSITORY / "examples"
TIMEOUT_S = 100

PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
HPCTRAIN = [sys.executable, "-m", "hpctrain"]

TINY_GPT = ["--max-steps=12", "--width=32", "--depth=1", "--max-bytes=60000", "--checkpoint-every=50"]


def run(*command: str | Path, cwd: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Return what `command` prints on stdout and then on stderr."""
    result = run_command(command, {"OMP_NUM_THREADS": "1"}, cwd=cwd, timeout=timeout_s)
    return result.stdout + result.stderr


def accuracy(output: str) -> float:
    match = re.search(r"validation accuracy after \d+ steps: ([\d.]+)%", output)
    assert match, output
    return float(match[1])


def losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, the later one if it was trained twice."""
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if "loss" in record}


@pytest.mark.extended
def test_digits_alone_learns_and_leaves_no_files(tmp_path: Path) -> None:
    output = run(*PYTHON, EXAMPLES / "digits.py", cwd=tmp_path)
    assert accuracy(output) >= 97
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.timeout(900)
def test_demo_installs_itself_and_reaches_97_percent(tmp_path: Path) -> None:
    """`make demo` in a clone: two emulated nodes, four ranks."""
    clone = tmp_path / "clone"
    run("git", "clone", "--quiet", EXAMPLES.parent, clone, cwd=tmp_path)
    output = run("make", "demo", cwd=clone, timeout_s=600)
    assert "Successfully installed" in output
    assert accuracy(output) >= 97
    (run_dir,) = (clone / "runs").iterdir()
    assert set(losses(run_dir)) == set(range(1, 301))
    assert len(list((run_dir / "logs" / "attempt-000").glob("rank-*.log"))) == 4
    for name in ("metrics.jsonl", "logs", "checkpoints"):
        assert f"runs/{run_dir.name}/{name}" in output


@pytest.mark.extended
def test_gpt_alone_generates_text(tmp_path: Path) -> None:
    output = run(*PYTHON, EXAMPLES / "gpt.py", *TINY_GPT, cwd=tmp_path)
    assert "nats per byte\nthe model writes:\n\ndef main(" in output


@pytest.mark.long
def test_gpt_loss_falls(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ["--backend=local", f"--run-dir={run_dir}", "--ntasks-per-node=2", "--follow"]
    output = run(*HPCTRAIN, "submit", *options, EXAMPLES / "gpt.py", *TINY_GPT, cwd=tmp_path)
    assert "def main(" in output
    loss = losses(run_dir)
    assert loss[12] < loss[1] - 0.5


@pytest.mark.extended
def test_plain_ddp_alone_trains_and_saves(tmp_path: Path) -> None:
    output = run(*PYTHON, EXAMPLES / "plain_ddp.py", "--max-steps", "100", cwd=tmp_path)
    assert "step 100: loss" in output
    assert (tmp_path / "checkpoints" / "plain_ddp.pt").exists()


@pytest.mark.long
def test_plain_ddp_resumes_after_a_requeue(tmp_path: Path) -> None:
    """A stop saves and exits with 75; the next attempt ends like an undisturbed run."""
    run_dir = tmp_path / "run"
    script = [EXAMPLES / "plain_ddp.py", "--max-steps", "2000", "--save-every", "100"]
    shape = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"]
    run(*HPCTRAIN, "submit", *shape, "--run-dir", run_dir, *script, cwd=tmp_path)
    wait_for((run_dir / "checkpoints" / "plain_ddp.pt").exists, 30, "the first checkpoint of plain_ddp.py")
    run(*HPCTRAIN, "requeue", run_dir, cwd=tmp_path)
    run(*HPCTRAIN, "wait", run_dir, cwd=tmp_path)
    undisturbed = run(*TORCHRUN, *script, "--checkpoint", tmp_path / "other.pt", cwd=tmp_path)
    resumed = (run_dir / "logs" / "attempt-001" / "rank-00000.log").read_text()
    assert "continued after step" in resumed
    assert undisturbed.splitlines()[-1] == resumed.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["lightning_sine", "accelerate_sine"])
def test_script_of_another_library_alone_resumes_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Under hpctrain: tests/e2e/test_any_program.py."""
    first = run(*PYTHON, EXAMPLES / f"{name}.py", "--max-steps", "100", cwd=tmp_path)
    assert "trained 100 steps" in first
    second = run(*PYTHON, EXAMPLES / f"{name}.py", "--max-steps", "150", cwd=tmp_path)
    assert "trained 150 steps" in second
    assert ("continued after step 100" in second) or ("Restored all states" in second)
