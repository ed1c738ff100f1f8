"""Stop and resume on the same and on other numbers of ranks."""

from pathlib import Path

import pytest
from helpers.training_runs import JOB, Run, assert_undisturbed, submit, train_on_forked_ranks
from helpers.waiting import wait_for

#: The random numbers of a dropout differ per rank.
NO_DROPOUT = ("--dropout", "0")


def train(path: Path, ranks: int, *arguments: str, stop: tuple[int, int] | None = None) -> Run:
    """Train to the end, or until a rank receives a stop signal after a step."""
    command = ["--checkpoint-every", "6", *arguments]
    if stop is None:
        return train_on_forked_ranks(path, JOB, command, ranks=ranks)
    with pytest.raises(AssertionError, match="exit code 75"):
        train_on_forked_ranks(path, JOB, [*command, f"--stop={stop[0]}:{stop[1]}"], ranks=ranks)
    return Run(path, {})


def test_run_on_4_2_3_4_ranks_equals_the_undisturbed_one(reference, tmp_path):
    for ranks, stop in ((4, (2, 8)), (2, (0, 16)), (3, (1, 23))):
        train(tmp_path, ranks, *NO_DROPOUT, stop=stop)
    run = train(tmp_path, 4, *NO_DROPOUT)
    stops, resumes = run.events("signal"), run.events("resumed")
    assert [event["step"] for event in resumes] == [event["step"] for event in stops]
    assert [event["saved"] for event in stops] == [True] * 3
    assert_undisturbed(run, reference(1, *NO_DROPOUT), rounding=True)


@pytest.mark.long
def test_same_number_of_ranks_is_bitwise_equal(reference, tmp_path):
    for stop in ((3, 5), (0, 15)):
        train(tmp_path, 4, stop=stop)
    assert_undisturbed(train(tmp_path, 4), reference(4))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_killed_and_resized_run_has_the_bits_of_one_rank(request, reference, tmp_path, backend):
    """Train on three ranks, kill a rank, cancel, and resume on two ranks."""
    env = request.getfixturevalue("slurm").env if backend == "slurm" else {}
    shape = [f"--backend={backend}", "--ntasks-per-node=3"]
    elastic = ["--grain-size", "4"]
    run = submit(tmp_path / "run", env, shape, step_s=0.1, slow_attempts=2, further=elastic)
    run.wait_for_step(8)
    run.kill_rank(1)
    wait_for(lambda: run.events("failure"), 60, "the failure")
    run.wait_for_step(16)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    run.hpctrain("resume", str(run.path), "--ntasks-per-node", "2")
    assert run.wait() == 0, run.describe()
    assert {event["world_size"] for event in run.events("started")} == {3, 2}
    assert_undisturbed(run, reference(1, *elastic))
