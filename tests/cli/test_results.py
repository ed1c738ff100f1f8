"""Hyper-parameters and metrics in `status`, `list` and the report."""

import json

import pytest

from hpctrain.rundir import RunDir
from hpctrain.sweeps.sweep_record import SweepRecord

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


def make_array(tmp_path, name: str) -> RunDir:
    array = RunDir(tmp_path / "runs" / name)
    array.path.mkdir(parents=True)
    array.spec.write_text("script: /x/train.py\n")
    array.log_event("submitted", 0, job_id="7", backend="local")
    return array


def add_trial(array: RunDir, number: int, args: str = "", state: str = "FAILED", **metrics: float) -> RunDir:
    task = array.task(number)
    task.path.mkdir()
    args = args or f"--lr, '0.{number}'"
    task.spec.write_text(f"script: /x/train.py\nargs: [{args}]\n")
    task.log_event("submitted", 0, job_id=f"7_{number}", backend="local")
    task.log_event("finished", 0, state=state, exit_code=0 if state == "COMPLETED" else 1)
    if metrics:
        task.storage.append(task.metrics, {"step": 9, **metrics})
    return task


@pytest.fixture
def array(tmp_path) -> RunDir:
    """A completed array of three tasks with a learning rate each; the last one has no metrics."""
    array = make_array(tmp_path, "a")
    for index, (lr, val) in enumerate([(0.1, 0.5), (0.01, 0.25), (0.001, None)]):
        metrics = {} if val is None else {"loss": 1.0, "val_loss": val}
        task = add_trial(array, index, f"--lr, '{lr}', --seed, '1'", "COMPLETED", **metrics)
        if val is not None:
            task.checkpoint(9).mkdir(parents=True)
    return array


def test_status_shows_the_best_value_and_the_hyper_parameters(hpctrain, array):
    text = hpctrain("status", "a/task-1").stdout
    assert "best        val_loss 0.25 at step 9; best checkpoint: step 9\n" in text
    assert "hparams     lr=0.01 seed=1\n" in text
    document = json.loads(hpctrain("status", "a/task-1", "--json").stdout)
    assert document["hparams"] == {"lr": 0.01, "seed": 1}
    assert document["metrics"] == {"loss": 1.0, "val_loss": 0.25}
    assert document["best"]["checkpoint"] == str(array.task(1).checkpoint(9))


def test_status_does_not_parse_large_files_of_metrics(hpctrain, array):
    with array.task(1).metrics.open("ab") as file:
        file.write(b" " * 50_000_000)
    text = hpctrain("status", "a/task-1").stdout
    assert "best        not computed: 50 MB of metrics (use --json)\n" in text
    assert "hparams     lr=0.01 seed=1\n" in text
    assert json.loads(hpctrain("status", "a/task-1", "--json").stdout)["best"]["value"] == 0.25


def test_sweep_status_shows_the_tasks_of_an_array_best_first(hpctrain, array):
    lines = [line.split() for line in hpctrain("sweep", "status", "a").stdout.splitlines()[1:]]
    assert lines == [
        ["RUN", "STATE", "STEP", "lr", "val_loss", "(min)", "AT"],
        ["a/task-1", "COMPLETED", "9", "0.01", "0.25", "9"],
        ["a/task-0", "COMPLETED", "9", "0.1", "0.5", "9"],
        ["a/task-2", "COMPLETED", "–", "0.001", "–", "–"],
    ]


def test_report_leads_with_the_metric_and_its_checkpoint(hpctrain, array):
    page = hpctrain("report", "a/task-1", "-o", "-").stdout
    assert page.index("<dt>val_loss</dt><dd>0.25</dd>") < page.index("<dt>Steps</dt>")
    assert f"Best checkpoint: <code>{array.task(1).checkpoint(9)}</code>" in page
    assert "<code>lr=0.01</code>" in page
    comparison = hpctrain("report", "a", "-o", "-").stdout
    assert "task-1: lr=0.01" in comparison
    cells = "".join(f'<td class="n">{text}</td>' for text in ("0.01", "COMPLETED", "0.25"))
    assert f'<th scope="row">a/task-1</th>{cells}' in comparison
    rows = [comparison.index(f'<th scope="row">a/task-{number}</th>') for number in (1, 0, 2)]
    assert rows == sorted(rows)


def test_escape_sequences_are_not_printed(hpctrain, array):
    task = array.task(0)
    task.storage.append(task.environment, {"hparams": {"x\x1b[31m": "y\x1b[2J"}})
    task.storage.append(task.metrics, {"step": 10, "val_loss": 0.1, "z\x1b[31m": 1.0})
    for args in (["status", "a/task-0"], ["sweep", "best", "a"], ["sweep", "status", "a"]):
        result = hpctrain(*args)
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout


def test_trial_without_the_metric_of_the_others_is_last(hpctrain, tmp_path):
    array = make_array(tmp_path, "b")
    # The first trial crashed before its first validation.
    add_trial(array, 0, loss=0.5)
    add_trial(array, 1, loss=0.2, val_loss=3.0)
    add_trial(array, 2, loss=0.9, val_loss=2.0)
    ranked = json.loads(hpctrain("sweep", "status", "b", "--json").stdout)["trials"]
    assert [trial["run_id"] for trial in ranked] == ["b/task-2", "b/task-1", "b/task-0"]
    assert [trial["best"] and trial["best"]["value"] for trial in ranked] == [2.0, 3.0, None]
    assert json.loads(hpctrain("sweep", "best", "b", "--json").stdout)["run_id"] == "b/task-2"


def test_sweep_is_ranked_by_its_metric_everywhere(hpctrain, tmp_path):
    array = make_array(tmp_path, "b")
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        add_trial(array, number, val_loss=float(number), val_accuracy=accuracy)
    array.sweep.write_text(
        SweepRecord(args=(), space={}, folder="/", metric="val_accuracy", mode="max").text()
    )
    best_first = [1, 2, 0]
    ranked = json.loads(hpctrain("sweep", "status", "b", "--json").stdout)["trials"]
    assert [trial["run_id"] for trial in ranked] == [f"b/task-{number}" for number in best_first]
    assert "best        val_accuracy 0.9 at step 9\n" in hpctrain("status", "b/task-1").stdout
    comparison = hpctrain("report", "b", "-o", "-").stdout
    rows = [comparison.index(f'<th scope="row">b/task-{number}</th>') for number in best_first]
    assert rows == sorted(rows)
    # An explicit metric has its own direction.
    ranked = json.loads(hpctrain("sweep", "status", "b", "--metric", "val_loss", "--json").stdout)["trials"]
    assert [trial["run_id"] for trial in ranked] == ["b/task-0", "b/task-1", "b/task-2"]


def test_trials_that_were_never_submitted_are_resumed_and_not_cancelled(hpctrain, tmp_path):
    (tmp_path / "train.py").write_text("print('trained')\n")
    submit = ["--backend=local", "--ntasks-per-node=1", "--run-dir=runs/s", "train.py"]
    hpctrain("sweep", "--over", "lr=1,2", *submit)
    hpctrain("wait", "s")
    sweep = RunDir(tmp_path / "runs" / "s")
    sweep.task(1).events.unlink()  # as if the submission of this trial had been interrupted
    assert "COMPLETED" in hpctrain("cancel", "s/task-0").stderr + hpctrain("cancel", "s/task-0").stdout
    resumed = hpctrain("sweep", "resume", "s", "--json")
    assert json.loads(resumed.stdout)["trials"] == [1], resumed.stderr
    hpctrain("wait", "s")
    assert json.loads(hpctrain("status", "s/task-1", "--json").stdout)["state"] == "COMPLETED"
