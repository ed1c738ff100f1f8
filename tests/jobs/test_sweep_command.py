"""`hpctrain sweep` with fake supervisors: trials are tasks of a job array."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.errors import SchedulerError
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir
from hpctrain.sweeps.sweep_record import SweepRecord, read_sweep


@pytest.fixture
def hpctrain(tmp_path, script, fake_interpreter, monkeypatch) -> Callable[..., Result]:
    """Run the command in this process, in the folder of a script whose only argument is its fate."""
    monkeypatch.chdir(tmp_path)

    def call(*args: str) -> Result:
        return CliRunner().invoke(cli, args, catch_exceptions=False)

    return call


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.slow
def test_sweep_with_a_failing_trial_is_resumed_and_extended(hpctrain, tmp_path):
    words = ["--as", "{value}", "--concurrent", "2", "--backend", "local", "--no-code-snapshot", "--json"]
    result = hpctrain("sweep", "--over", "fate=nap,fail", *words, "--run-dir", "runs/s", "train.py")
    assert document(result)["trials"] == [0, 1]
    assert hpctrain("wait", "s").exit_code == 4
    text = hpctrain("sweep", "status", "s").stdout
    assert text.startswith("s: 2 tasks: 1 FAILED, 1 COMPLETED\n")
    assert "\ns/task-1: rank 3 crashed: RuntimeError: boom\n    log: runs/s/task-1/logs/" in text
    assert "\nbest        loss 0.5 at step 7\n" in hpctrain("sweep", "best", "s").stdout
    assert "whose trials have different arguments" in hpctrain("resume", "s").output
    result = hpctrain("sweep", "--over", "fate=nap", "--backend", "local", "--run-dir", "runs/s", "train.py")
    assert "already contains a sweep" in result.output

    assert "do not support --follow" in hpctrain("sweep", "resume", "s", "--follow").output
    assert "accepts only options" in hpctrain("sweep", "resume", "s", "train.py", "--y=1").output
    result = hpctrain("sweep", "resume", "s", "--name", "again")
    assert result.stdout.startswith("Sweep s: 1 trial, job "), result.output
    assert hpctrain("wait", "s").exit_code == 4
    result = hpctrain("sweep", "extend", "s", "--over", "fate=nap,twice", "--concurrent", "1", "--json")
    assert document(result)["trials"] == [2]
    hpctrain("wait", "s")
    assert "already has all of these trials" in hpctrain("sweep", "extend", "s", "--over", "fate=nap").output

    status = document(hpctrain("sweep", "status", "s", "--json"))
    assert status["states"] == {"FAILED": 1, "COMPLETED": 2}
    attempts = {one["run_id"]: (one["state"], one["attempt"]) for one in status["trials"]}
    assert attempts == {"s/task-0": ("COMPLETED", 0), "s/task-1": ("FAILED", 1), "s/task-2": ("COMPLETED", 1)}
    sweep = RunDir(tmp_path / "runs/s")
    assert [load_spec(sweep.task(n).spec).args for n in range(3)] == [("nap",), ("fail",), ("twice",)]
    assert [load_spec(sweep.task(n).spec).name for n in range(3)] == ["train", "again", "again"]


@pytest.mark.slow
def test_cancelled_trials_are_resumed(hpctrain, tmp_path):
    words = ["--as", "{value}", "--backend", "local", "--no-code-snapshot", "--run-dir", "runs/s", "train.py"]
    assert hpctrain("sweep", "--over", "fate=nap,sleep", "--concurrent", "2", *words).exit_code == 0
    assert "run s" in hpctrain("sweep", "cancel", "s").output
    hpctrain("wait", "s")
    states = document(hpctrain("sweep", "status", "s", "--json"))["states"]
    assert states.get("CANCELLED"), states
    assert "Sweep s: " in hpctrain("sweep", "resume", "s").output
    assert hpctrain("sweep", "cancel", "s").exit_code == 0
    hpctrain("wait", "s")


@pytest.mark.slow
def test_random_trials_are_extended(hpctrain):
    words = ["--as", "{value}", "--random", "1", "--backend", "local", "--run-dir", "runs/s", "train.py"]
    assert hpctrain("sweep", "--over", "fate=nap", *words).exit_code == 0
    hpctrain("wait", "s")
    assert "Add --random N" in hpctrain("sweep", "extend", "s", "--over", "fate=nap").output
    assert document(hpctrain("sweep", "extend", "s", "--random", "2", "--json"))["trials"] == [1, 2]
    assert hpctrain("wait", "s").exit_code == 0


def test_rejected_extension_leaves_the_sweep_unchanged(prepared, tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise SchedulerError("too many jobs")

    record = SweepRecord(args=(), space={"n": "1..9"}, folder="/", sampler="random", metric="loss")
    folder = RunDir(tmp_path / "r")
    folder.path.mkdir()
    folder.sweep.write_text(record.with_trials(1).text())
    folder.task(0).path.mkdir()
    for path in (folder.spec, folder.job_script):
        path.touch()
    submission = prepared(run_dir="r", array="1-2")
    monkeypatch.setattr(type(submission.backend), "submit", refuse)
    with pytest.raises(SchedulerError):
        submit_prepared(submission, sweep=record.with_trials(3))
    assert len(read_sweep(folder).trials) == 1
    assert folder.tasks() == [0]
