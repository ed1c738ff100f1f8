"""Flipped bits in the memory of a rank: the run names the rank, and its result is that without the flip."""

import json
from pathlib import Path

import pytest
from helpers.saved_states import equal
from helpers.training_runs import Run, assert_undisturbed, submit

from hpctrain.checkpoint.store import CheckpointStore

LOCAL = ["--backend", "local", "--ntasks-per-node", "3", "--standby-workers", "never"]


def assert_same_result(run: Run, reference: Run) -> None:
    """Fail unless losses, parameters and optimizer state are bitwise the reference's."""
    assert_undisturbed(run, reference)
    folders = (run.dir.checkpoints, reference.dir.checkpoints)
    loaded, expected = (CheckpointStore(folder).load_newest()[0] for folder in folders)
    assert loaded.step == expected.step == loaded.verified_step
    for part in ("module", "optimizers"):
        assert equal(loaded.state[part], expected.state[part])


def submit_with_flip(path: Path, **flip) -> Run:
    return submit(path, {}, LOCAL, step_s=0.0, further=["--flip-bit", json.dumps(flip)])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("target", "rank", "seed"), [("parameter", 1, 5), ("optimizer", 2, 5)])
def test_flipped_bit_is_detected_and_the_run_restarts(tmp_path, reference, target, rank, seed):
    run = submit_with_flip(tmp_path / "run", rank=rank, target=target, seed=seed, step=9)
    assert run.wait() == 0, run.describe()
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"], failure["device"]) == (
        "corruption",
        rank,
        f"CPU of rank {rank}",
    )
    assert failure["verified_step"] == 6
    assert f"rank {rank} (CPU of rank {rank} on " in failure["cause"]
    assert "After step 12, " in failure["cause"]
    assert "flipped bit" in run.dir.rank_log(0, rank).read_text()
    (restart,) = run.events("restart")
    assert "there is no other node" in restart["note"]
    (resumed,) = run.events("resumed")
    assert resumed["step"] == 6
    assert_same_result(run, reference(3))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_persistent_fault_on_the_only_node_ends_the_run(tmp_path):
    run = submit_with_flip(tmp_path / "run", rank=1, seed=5, step=9, persistent=True)
    assert run.wait() == 4
    assert [failure["rank"] for failure in run.events("failure")] == [1, 1]
    (end,) = run.events("finished")
    assert "CPU of rank 1 on" in end["note"]
    assert "computed wrong results 2 times" in end["note"]


@pytest.mark.long
def test_node_named_by_the_witness_is_replaced(slurm, reference, tmp_path):
    elastic = ["--grain-size", "6"]
    flip = json.dumps({"rank": 1, "target": "gradient", "seed": 5, "step": 9})
    shape = ["--nodes", "3", "--gpus-per-node", "1", "--spare-nodes", "1"]
    run = submit(
        tmp_path / "run",
        slurm.env,
        shape,
        step_s=0.0,
        further=[*elastic, "--witness-every", "1", "--flip-bit", flip],
    )
    assert run.wait() == 0, run.describe()
    faulty = run.events("started")[0]["hosts"][1]
    (failure,) = run.events("failure")
    # The gradients were compared up to step 8, but the parameters only before the last checkpoint.
    assert (failure["class"], failure["host"], failure["verified_step"]) == ("corruption", faulty, 6)
    assert "In step 9, " in failure["cause"]
    (excluded,) = run.events("excluded")
    assert excluded["hosts"] == [faulty]
    assert faulty not in run.events("replace")[0]["hosts"]
    assert_same_result(run, reference(1, *elastic))
