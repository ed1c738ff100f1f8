"""`hpctrain sweep`: dry runs, errors, and random trials."""

import json

import pytest

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow

#: The loss is lowest at x = 3. The first attempt at x < 3 fails.
TRIAL = """
import json, os, pathlib, sys
run, x = pathlib.Path(os.environ["HPCTRAIN_RUN_DIR"]), float(sys.argv[-1])
if x < 3 and not (run / "failed").exists():
    (run / "failed").touch()
    sys.exit("the first attempt fails")
(run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": (x - 3) ** 2}) + "\\n")
"""


@pytest.mark.extended
@pytest.mark.ranks
def test_random_trials_are_resumed_and_extended(hpctrain, tmp_path):
    def document(*args: str):
        return json.loads(hpctrain("sweep", *args, "--json").stdout)

    (tmp_path / "train.py").write_text(TRIAL)
    shape = ["--backend=local", "--concurrent=2", "--max-failures=1", "--run-dir=runs/s", "train.py"]
    words = ["--over", "x=0..9", "--random", "4", "--metric", "loss", "--sweep-seed", "1"]
    result = hpctrain("sweep", *words, *shape)
    assert result.stdout.startswith("Sweep s: 4 trials"), result.stderr
    hpctrain("wait", "s")
    failed = {one["run_id"]: one["hparams"]["x"] for one in document("status", "s")["trials"]}
    assert {run: x < 3 for run, x in failed.items()} == {
        one["run_id"]: one["state"] == "FAILED" for one in document("status", "s")["trials"]
    }
    # A resumed trial keeps its values.
    assert "accepts only options" in hpctrain("sweep", "resume", "s", "train.py", "--y=1").stderr
    assert hpctrain("sweep", "resume", "s").returncode == 0
    hpctrain("wait", "s")
    assert "Add --random N" in hpctrain("sweep", "extend", "s", "--over", "x=1..2").stderr
    assert document("extend", "s", "--random", "2")["trials"] == [4, 5]
    hpctrain("wait", "s")
    trials = document("status", "s")["trials"]
    values = {one["run_id"]: one["hparams"]["x"] for one in trials}
    assert len(values) == 6
    assert failed.items() <= values.items()
    assert document("best", "s")["best"]["value"] == min((x - 3) ** 2 for x in values.values())


def test_trials_of_a_dry_run(hpctrain, tmp_path):
    (tmp_path / "hpctrain.yaml").write_text("sweep:\n  lr: [1e-4, 3e-4]\n  seed: 0:2\n")
    result = hpctrain("sweep", "--dry-run", "--backend", "local", "--as", "{name}={value}", "train.py", "x")
    assert result.stdout.splitlines() == [
        "task-0: x lr=1e-4 seed=0",
        "task-1: x lr=1e-4 seed=1",
        "task-2: x lr=3e-4 seed=0",
        "task-3: x lr=3e-4 seed=1",
    ]
    assert not (tmp_path / "runs").exists()
    result = hpctrain("sweep", "--dry-run", "--backend=local", "--concurrent=1", "train.py")
    assert "one after another. Use --concurrent 2 to run two at a time." in result.stderr
    result = hpctrain(
        "sweep", "--dry-run", "--backend=local", "--over=n=1..9", "--random=3", "--sweep-seed=1", "train.py"
    )
    assert result.stdout.splitlines() == ["task-0: --n 7", "task-1: --n 8", "task-2: --n 2"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.py"], "The sweep has no hyper-parameters. Use --over NAME=VALUES"),
        (["--over", "lr=1", "--mode", "max", "train.py"], "--mode is the direction of a metric"),
        (["--over", "lr=1", "--dry-run", "--json", "train.py"], "Remove --json"),
        (["--over", "lr=1", "--over", "lr=2", "train.py"], "'lr' is given twice"),
        (["train.py", "--over", "lr=1"], "Use --over NAME=VALUES before SCRIPT"),
        (["--over", "lr=1", "--follow", "train.py"], "No such option '--follow'"),
        (["--over", "lr", "train.py"], "'lr' is not of the form NAME=VALUES"),
        (["--over", "lr=1..2", "train.py"], "lr is a range (--over)"),
        (["--over", "lr=1", "--array", "0-1", "train.py"], "A sweep sets --array itself"),
        (["--over", "lr=1", "--as", "x", "train.py"], "'x' is not a valid argument format"),
        (["--over", "lr=1", "--nodez", "2", "train.py"], "Did you mean '--nodes'?"),
        (["--over", "lr=1", "--stop-early", "asha", "train.py"], "Add --metric NAME"),
        (
            ["--over", "lr=1", "--metric=x", "--stop-early=best", "train.py"],
            "must be median, asha or asha:FACTOR",
        ),
        (["--over", "lr=1", "--min-steps", "5", "train.py"], "Add --stop-early"),
        (["--over", "lr=1", "--sweep-seed", "5", "train.py"], "Add --random N"),
        (["best", "none"], "There is no run 'none'"),
    ],
)
def test_errors(hpctrain, args, words):
    result = hpctrain("sweep", *args)
    assert result.returncode == 2
    assert words in result.stderr
