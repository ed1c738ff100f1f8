"""Runs of scripts that call `disturbance.after_step`, and what they leave behind."""

from pathlib import Path
from typing import Any

import torch

from helpers import SCRIPTS
from helpers.training_runs import Run


def train(
    folder: Path, script: str, *arguments: str, disturb: str = "", num_ranks: int = 2
) -> tuple[Run, Any]:
    """Run a script of `tests/scripts` to its end on one pretended node; return the run and its result.

    The script gets the path of its result as first argument.
    """
    run = Run(folder / f"run-{disturb.partition(':')[0]}", {"OMP_NUM_THREADS": "1"})
    result = folder / "result"
    result.unlink(missing_ok=True)
    options = ["--backend=local", f"--ntasks-per-node={num_ranks}", "--standby-workers=never"]
    options += [f"--env=DISTURB={disturb}", f"--run-dir={run.path}"]
    run.hpctrain("submit", *options, str(SCRIPTS / script), str(result), *arguments)
    assert run.wait() == 0, run.describe() + log_of(run)
    return run, torch.load(result, weights_only=False)


def log_of(run: Run) -> str:
    return "".join(run.dir.rank_log(attempt, 0).read_text() for attempt in run.dir.attempts())


def assert_resumed(run: Run, disturb: str, batches_per_step: int = 1) -> None:
    """The run was disturbed once, after so many batches, and resumed from a step that was saved."""
    kind, _, batches = disturb.partition(":")
    step = int(batches) / batches_per_step
    assert len(run.dir.attempts()) == 2
    failures = [(failure["rank"], failure["cause"]) for failure in run.events("failure")]
    if kind in ("kill", "hang"):
        assert [rank for rank, _ in failures] == [1], failures
    else:
        assert failures == []
        assert len(run.events("requeue")) == 1
    (resumed,) = (event["step"] for event in run.events("resumed"))
    assert 0 < resumed <= step if failures else resumed >= step


def assert_same_bits(result: Any, undisturbed: Any) -> None:
    assert len(result) == len(undisturbed) > 0
    for one, other in zip(result, undisturbed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
