"""Plan of a verification, and what it reads from the record of a run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from hpctrain.errors import SpecError
from hpctrain.jobs.verify.scratch_run import ScratchRun
from hpctrain.jobs.verify.training_record import TrainingRecord, plan_verification
from hpctrain.jobs.verify.verify_run import compare_environments, compare_metrics, compare_samples, verify_run
from hpctrain.rundir import RunDir

NAN = float("nan")


class RunBuilder:
    """Writes the records of a run."""

    def __init__(self, path: Path) -> None:
        self.dir, self.attempt = RunDir(path), -1
        path.mkdir()

    def start(self, world_size: int, *, nodes: int = 1, resumed: int | None = None) -> "RunBuilder":
        self.attempt += 1
        self.dir.log_event("started", self.attempt, nodes=nodes, world_size=world_size)
        if resumed is not None:
            self.dir.log_event("resumed", self.attempt, step=resumed)
        return self

    def train(self, first: int, last: int, loss: float = 1.0, **metrics: Any) -> "RunBuilder":
        with open(self.dir.metrics, "a") as file:
            for step in range(first, last + 1):
                line = {"loss": loss, **metrics, "step": step, "attempt": self.attempt, "time": 1.0}
                file.write(json.dumps({**line, "spent": {"all": 0.5}}) + "\n")
        return self

    def save(self, *steps: int) -> "RunBuilder":
        for step in steps:
            folder = self.dir.checkpoint(step)
            folder.mkdir(parents=True)
            (folder / MANIFEST_NAME).write_bytes(Manifest(step, 1, 1.0, None, ()).encode())
            self.dir.log_event("checkpoint", self.attempt, step=step, path=str(folder))
        return self

    @property
    def record(self) -> TrainingRecord:
        return TrainingRecord(self.dir)

    def plan(self, first: int | None = None, last: int | None = None, ranks: int | None = None) -> Any:
        return plan_verification(self.record, first, last, ranks)


@pytest.fixture
def run(tmp_path) -> RunBuilder:
    return RunBuilder(tmp_path / "run")


@pytest.fixture
def write_spec(run, make_spec, tmp_path) -> Callable[..., None]:
    """Function that writes the specification of `run`, with a script that exists."""
    script = tmp_path / "train.py"
    script.touch()

    def write(**fields: Any) -> None:
        places = {"script": str(script), "workdir": str(tmp_path), "python": sys.executable}
        run.dir.spec.write_text(make_spec(**places, **fields).text())

    return write


def test_whole_run_is_trained_from_the_beginning(run):
    plan = run.start(4).train(1, 30).save(20, 30).plan()
    assert (plan.start, plan.last, plan.start_checkpoint) == (0, 30, None)
    assert plan.checkpoint == (30, run.dir.checkpoint(30))
    assert [(part.last, part.shape.world_size, part.saved) for part in plan.parts] == [(30, 4, (30,))]
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("steps", "start", "state"),
    [((21, 30), 20, 30), ((25, 29), 20, None), ((15, 25), 0, 20), ((30, 30), 20, 30), ((31, None), 30, None)],
)
def test_training_starts_at_the_newest_checkpoint_before_the_steps(run, steps, start, state):
    plan = run.start(1).train(1, 32).save(20, 30).plan(*steps)
    assert plan.start == start
    assert (plan.checkpoint and plan.checkpoint[0]) == state


def test_removed_checkpoint_is_replaced_by_the_beginning_and_later_starts_are_named(run):
    plan = run.start(1).train(1, 30).save(20, 25, 30).plan(10, 15)
    assert (plan.start, plan.start_checkpoint) == (0, None)
    assert plan.notes[0] == (
        "No checkpoint before step 10 is left, so training starts at step 1. "
        "To start from a checkpoint, use --steps 21:30 or 26:30."
    )


def test_removed_import_cannot_be_verified(run):
    run.start(1, resumed=5).train(6, 30).save(20, 30)
    assert run.plan(21).start == 20
    with pytest.raises(SpecError, match="imported checkpoint of step 5") as error:
        run.plan()
    assert "--steps 21:30" in str(error.value)


def test_run_without_metrics_or_checkpoints_is_refused(run):
    run.start(1)
    with pytest.raises(SpecError, match="recorded no step metrics"):
        run.plan()
    run.train(1, 3)
    with pytest.raises(SpecError, match="no hpctrain checkpoint"):
        run.plan()


def test_validation_at_the_end_of_a_run_that_was_extended_later_is_not_compared(run, tmp_path):
    run.start(1).train(1, 3).train(4, 4, val_loss=2.0).save(4)
    run.dir.log_event("finished", 0, state="COMPLETED")
    run.start(1, resumed=4).train(5, 7).train(8, 8, val_loss=3.0).save(8)
    run.dir.log_event("finished", 1, state="COMPLETED")
    here = RunBuilder(tmp_path / "here").start(1).train(1, 8).record
    (missing,) = compare_metrics(run.record, here, range(1, 9), [])
    assert (missing.step, missing.name) == (8, "val_loss")


def test_resized_parts_keep_their_ranks_and_interruptions_are_merged(run):
    run.start(4).train(1, 12).save(10)
    run.start(4, resumed=10).train(11, 15).save(15)  # killed
    run.start(3, nodes=3, resumed=15).train(16, 22)  # lost its work
    run.start(3, nodes=3, resumed=15).train(16, 20).save(20)
    run.start(1)  # failed before it trained
    run.start(2, resumed=20).train(21, 30).save(30)
    plan = run.plan()
    assert [(part.last, *part.shape[:2]) for part in plan.parts] == [(15, 1, 4), (20, 3, 3), (30, 1, 2)]
    assert plan.attempts == (0, 1, 3, 5)
    part = run.plan(18, 25)
    assert (part.start, [(each.last, each.shape.world_size) for each in part.parts]) == (
        15,
        [(20, 3), (25, 2)],
    )
    assert part.attempts == (3, 5)
    assert [each.saved for each in part.parts] == [(20,), (25,)]
    other = run.plan(18, 25, ranks=7)
    assert [(each.last, each.shape.world_size, each.saved) for each in other.parts] == [(25, 7, (20, 25))]


def test_rollback_is_no_start_from_a_checkpoint(run):
    run.start(2).train(1, 7).save(4)
    run.dir.log_event("bad_loss", 0, step=7, action="rollback")
    run.dir.log_event("resumed", 0, step=4)
    run.train(5, 12).save(12)
    plan = run.plan()
    assert (plan.start, [(part.last, part.shape.world_size) for part in plan.parts]) == (0, [(12, 2)])
    write_samples(run, 0, 0, 6, 1, 2)
    write_samples(run, 0, 0, 7, 3, 4)
    assert run.record.samples == {6: {0: [1, 2]}}


@pytest.mark.parametrize(("every", "synced"), [("auto", (4, 8, 12)), (8, (4, 12)), (None, (4, 8, 12))])
def test_saves_at_other_steps_than_the_scheduled_ones_are_repeated(run, every, synced):
    """Some algorithms change the state of the ranks before a save. Step 10 was trained again."""
    run.start(2).train(1, 10).save(4, 8)
    run.dir.log_event("checkpoint", 0, step=10)
    run.start(2, resumed=8).train(9, 16).save(12, 16)
    assert run.plan().parts[0].synced == ()
    line = {"attempt": 0, "settings": {"checkpoint_every": every}}
    run.dir.environment.write_text(json.dumps(line) + "\n")
    assert run.plan().parts[0].synced == synced


def test_metrics_are_compared_exactly_and_nan_equals_nan(run, tmp_path):
    run.start(1).train(1, 1, loss=0.1).train(2, 2, loss=NAN).train(3, 3, loss=0.3, acc=1.0, seconds=5.0)
    other = RunBuilder(tmp_path / "other").start(1).train(1, 1, loss=0.1).train(2, 2, loss=NAN)
    other.train(3, 3, loss=0.3 + 2**-54, seconds=6.0, extra=1.0)
    found = list(compare_metrics(run.record, other.record, [1, 2, 3], ["seconds"]))
    differences = [(difference.step, difference.name, difference.here) for difference in found]
    assert differences == [(3, "loss", 0.3 + 2**-54), (3, "acc", "(missing)")]


def write_samples(run: RunBuilder, attempt: int, rank: int, step: int, *indices: int) -> None:
    file = run.dir.samples(attempt, rank)
    file.parent.mkdir(exist_ok=True)
    with open(file, "a") as lines:
        lines.write(json.dumps({"step": step, "epoch": 0, "indices": indices}) + "\n")


def test_samples_are_compared_by_rank_or_as_a_set(run, tmp_path):
    other = RunBuilder(tmp_path / "other")
    for each in (run, other):
        for rank in range(2):
            write_samples(each, 0, rank, 1, rank, rank + 2)
    write_samples(run, 0, 0, 2, 9)
    write_samples(run, 1, 0, 2, 4, 5)  # the later attempt counts
    write_samples(run, 1, 1, 2, 6)
    write_samples(other, 0, 0, 2, 6, 5, 4)
    assert list(compare_samples(run.record, other.record, [1, 2])) == []
    write_samples(other, 1, 0, 1, 0, 2)
    write_samples(other, 1, 1, 1, 1, 4)
    (found,) = compare_samples(run.record, other.record, [1, 2])
    assert str(found) == "samples of rank 1: 1, 3 in the record, 1, 4 here"


def test_each_differing_fact_is_named():
    one = {"torch": "1.0", "gpu": None, "args": "--lr 1", "code": {"a.py": "x", "b.py": "y"}, "world_size": 2}
    other = {**one, "torch": "2.0", "args": "--lr 2", "gpu": "H200", "code": {"a.py": "z"}}
    settings = {"settings": {"seed": 1, "run_dir": "a"}}
    assert compare_environments([one], [one]) == []
    assert compare_environments(
        [{**one, **settings}], [{**other, "settings": {"seed": 2, "run_dir": "b"}}]
    ) == [
        "code: a.py has changed (checksum x in the record, z here)",
        "code: b.py was imported in the recorded run, but not here",
        "setting seed: 1 in the record, 2 here",
        "arguments of the script: --lr 1 in the record, --lr 2 here",
        "PyTorch: 1.0 in the record, 2.0 here",
        "GPU model: none in the record, H200 here",
    ]
    # Records of earlier versions lack some facts.
    assert compare_environments([{"torch": "2.0"}], [other]) == []


def test_steps_without_anything_to_compare_are_refused(run, write_spec, tmp_path, monkeypatch):
    run.start(1).train(50, 50).save(7)
    write_spec()
    monkeypatch.setattr(ScratchRun, "train", lambda *_: None)
    with pytest.raises(SpecError, match="nothing to compare in steps 1:7"):  # the state is not saved again
        verify_run(run.dir, {}, last=7, parent=tmp_path, report=lambda _: None)
    with pytest.raises(SpecError, match=r"nothing to compare in steps 8:50.*excluded with --ignore"):
        verify_run(run.dir, {}, first=8, ignored_metrics=["loss"], report=lambda _: pytest.fail("trained"))
