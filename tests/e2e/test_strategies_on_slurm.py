"""Other strategies than ddp, preempted on a real Slurm, reach the undisturbed run's result."""

from __future__ import annotations

import pytest
from helpers.training_runs import (
    LAST_STEP,
    Run,
    assert_every_sample_once,
    assert_undisturbed,
    preempt,
    submit,
)

SHAPE = ["--nodes", "2", "--gpus-per-node", "2"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("strategy", "algorithm"),
    [
        ("fsdp", "allreduce"),
        ("zero1", "allreduce"),
        ("ddp2", "allreduce"),
        ("pipeline", "allreduce"),
        ("ddp", "bytegrad"),
        ("ddp", "local_sgd"),
    ],
)
def test_preempted_run_resumes_with_strategy(slurm, tmp_path, strategy, algorithm):
    """The result is bitwise equal; diverging replicas synchronize once more before a stop."""

    def submit_run(name: str, step_s: float) -> Run:
        options = ["--env", f"HPCTRAIN_STRATEGY={strategy}"]
        further = ["--algorithm", algorithm]
        return submit(tmp_path / name, slurm.env, SHAPE, options=options, step_s=step_s, further=further)

    reference = submit_run("reference", 0.0)
    assert reference.wait() == 0
    run = submit_run("run", 0.2)
    run.wait_for_step(10)
    preempt(slurm.env)
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    (stop,) = run.events("signal")
    assert run.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    if algorithm == "local_sgd":
        assert_every_sample_once(run)
        assert list(run.losses()) == list(reference.losses())
        before = {step: loss for step, loss in reference.losses().items() if step <= stop["step"]}
        assert before.items() <= run.losses().items()
        assert run.losses()[LAST_STEP] == pytest.approx(reference.losses()[LAST_STEP], rel=0.05)
    else:
        assert_undisturbed(run, reference)
