"""Runs in dependencies, with handwritten records; test_slurm_live.py queries a real Slurm."""

from collections.abc import Callable

import pytest

from hpctrain.errors import RunNotFound, SpecError
from hpctrain.jobs.submit.complete_options import resolve_dependency
from hpctrain.rundir import RunDir


@pytest.fixture
def resolve(tmp_path, make_spec) -> Callable[[str], tuple[str, list[str]]]:
    """Resolve among runs named after their state; `going` is job 17."""
    for name in ("COMPLETED", "FAILED", "CANCELLED", "going", "never", "here"):
        # By their ids, and one by its folder.
        run = RunDir(tmp_path / name if name == "going" else tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.spec.write_text(make_spec(run_dir=str(run.path)).text())
        if name != "never":
            run.log_event("submitted", 0, job_id="17", backend="local" if name == "here" else "slurm")
        if name.isupper():
            run.log_event("finished", 0, state=name, cause="x")
    # No Slurm answers here, so a run without a recorded end may still be active.
    return lambda text: resolve_dependency(text, tmp_path, {"PATH": str(tmp_path)}, "runs")


@pytest.mark.parametrize(
    "text",
    [
        "singleton",
        "afterok:1:2,afterany:3_4",
        "after:1+5:2",
        "aftercorr:7",
        "afterok:1?afternotok:2",
        "expand:3",
    ],
)
def test_dependencies_on_jobs_are_unchanged(resolve, text):
    assert resolve(text) == (text, [])


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("afterok:going", "afterok:17"),
        ("afterok:3:going,singleton", "afterok:3:17,singleton"),
        ("after:going+5", "after:17+5"),
        ("afterok:COMPLETED", ""),
        ("afterok:COMPLETED:4", "afterok:4"),
        ("afterany:FAILED,afterok:5", "afterok:5"),
        ("afternotok:CANCELLED", ""),
        ("after:CANCELLED", ""),
        ("afterok:FAILED?afterok:going", "afterok:17"),
        ("afterok:going?afterany:FAILED", ""),
        ("afterburstbuffer:COMPLETED", "afterburstbuffer:17"),
    ],
)
def test_runs_become_jobs_and_fulfilled_conditions_are_dropped(resolve, text, resolved):
    result, notes = resolve(text)
    assert result == resolved
    states = [word for word in ("COMPLETED", "FAILED", "CANCELLED") if word in text]
    assert all("has no effect" in note for note in notes)
    assert bool(notes) == bool(states and "?afterok:going" not in text and "burst" not in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("afterok:FAILED", "is already FAILED, so the job would wait forever"),
        ("afterok:4,afterok:CANCELLED", "is already CANCELLED, so"),
        ("afternotok:COMPLETED", "is already COMPLETED, so"),
        ("afterok:FAILED?afterok:CANCELLED", "is already FAILED, so"),
        ("afterok:never", "never been submitted"),
        ("afterok:here", "uses the local backend"),
        ("aftrok:3", "Did you mean 'afterok'"),
        ("x", "unknown kind of dependency 'x'. Choose from after, "),
        ("afterok:", "afterok: specifies neither a job nor a run"),
    ],
)
def test_impossible_dependency_is_refused(resolve, text, message):
    with pytest.raises(SpecError, match=message):
        resolve(text)


def test_unknown_run_in_a_dependency_is_reported(resolve):
    with pytest.raises(RunNotFound, match="Did you mean 'FAILED'"):
        resolve("afterok:FAILE")
