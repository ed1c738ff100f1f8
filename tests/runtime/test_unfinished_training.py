"""A script that exits with 0 during training is not complete."""

import json
import subprocess
import sys

import pytest
from helpers.commands import environment
from test_worker import STEP

from hpctrain.rundir import RunDir
from hpctrain.runtime import unfinished_training
from hpctrain.runtime.unfinished_training import TrainingMarker

pytestmark = pytest.mark.ranks

HEAD = """
import os, sys
from hpctrain.runtime.unfinished_training import TrainingMarker
training = TrainingMarker("Trainer.fit()", "/data", os.environ)
"""


@pytest.fixture(autouse=True)
def _reset_state(monkeypatch):
    monkeypatch.setattr(unfinished_training, "_unfinished", {})
    monkeypatch.setattr(unfinished_training, "_has_stopped", False)


@pytest.fixture
def run(tmp_path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def variables(run: RunDir) -> dict[str, str]:
    return {"HPCTRAIN_RUN_DIR": str(run.path), "HPCTRAIN_ATTEMPT": "4", "RANK": "1"}


def marker(run: RunDir, folder: str = "/data") -> TrainingMarker:
    return TrainingMarker("Trainer.fit()", folder, variables(run))


def run_script(run: RunDir, text: str) -> int:
    script = run.path.parent / "script.py"
    script.write_text(HEAD + text)
    command = [sys.executable, "-P", "-m", "hpctrain.runtime.worker", json.dumps(["script", str(script)])]
    env = environment({**STEP, "HPCTRAIN_RUN_DIR": str(run.path)})
    return subprocess.run(command, env=env, timeout=120).returncode


def failure(run: RunDir) -> dict:
    return json.loads(run.failure(4, 1).read_text())


def test_marker_file_exists_until_training_returns(run):
    with marker(run) as training:
        training.set_last_step(10)
        (path,) = run.unfinished_files(4)
        assert json.loads(path.read_text()) == {"what": "Trainer.fit()", "last_step": 10}
        assert unfinished_training.find_unfinished_training() is not None
    assert run.unfinished_files(4) == []
    assert unfinished_training.find_unfinished_training() is None


def test_exception_keeps_the_file_and_is_recorded(run):
    training = marker(run)
    training.step, training.last_step = 4, 10
    with pytest.raises(ValueError, match="bad"), training:
        raise ValueError("bad data")
    assert len(run.unfinished_files(4)) == 1
    record = unfinished_training.find_unfinished_training()
    assert (record["kind"], record["error"]) == ("exception", "ValueError")
    assert record["message"].startswith("bad data (the script caught this exception); ")
    assert record["message"].endswith("before Trainer.fit() finished (after step 4 of 10)")


def test_training_in_another_folder_does_not_clear_the_first(run):
    with pytest.raises(MemoryError), marker(run):
        raise MemoryError
    with marker(run, "/other"):
        pass
    assert unfinished_training.find_unfinished_training()["error"] == "MemoryError"
    assert len(run.unfinished_files(4)) == 1


def test_no_training_begins_after_a_stop(run):
    with pytest.raises(SystemExit), marker(run):
        raise SystemExit(75)
    assert unfinished_training.has_stopped()
    with pytest.raises(SystemExit) as exit_info, marker(run, "/other"):
        pytest.fail("it has begun")
    assert exit_info.value.code == 75


def test_script_that_exits_during_training_has_failed(run):
    text = "with training:\n    training.step = 4\n    training.set_last_step(10)\n    sys.exit()"
    assert run_script(run, text) == 1
    assert failure(run)["kind"] == "unfinished"
    assert failure(run)["error"].endswith("before Trainer.fit() finished (after step 4 of 10)")
    assert "call end() on the trainer" in failure(run)["message"]
    assert "before Trainer.fit() finished" in run.rank_log(4, 1).read_text()


@pytest.mark.parametrize("ending", ["", "raise ValueError('late')"])
def test_script_that_swallowed_a_stop_is_continued(run, ending):
    text = f"try:\n    with training:\n        sys.exit(75)\nexcept BaseException:\n    pass\n{ending}"
    assert run_script(run, text) == 75
    assert not run.failure(4, 1).exists()
