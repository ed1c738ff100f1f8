"""`hpctrain sweep`: dry runs and errors."""

import pytest

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


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
