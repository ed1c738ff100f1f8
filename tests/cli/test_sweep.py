"""`hpctrain sweep` on this machine: trials are tasks of a job array."""

from __future__ import annotations

import json

import pytest

from hpctrain.rundir import RunDir
from hpctrain.spec.load_spec import load_spec

SCRIPT = """
import argparse, os
import hpctrain
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
if args.lr == 0.5 and args.seed and not os.path.exists("mended"):
    raise ValueError("these values do not work")
hpctrain.log_metrics({"val_acc": args.lr + args.seed}, step=3)
"""


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
    result = hpctrain(
        "sweep", "--dry-run", "--backend=local", "--over=n=1..9", "--random=3", "--sweep-seed=1", "train.py"
    )
    assert result.stdout.splitlines() == ["task-0: --n 7", "task-1: --n 8", "task-2: --n 2"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train.py"], "No hyper-parameters. Use --over NAME=VALUES"),
        (["--over", "lr", "train.py"], "'lr' is not of the form NAME=VALUES"),
        (["--over", "lr=1..2", "train.py"], "lr is a range (--over)"),
        (["--over", "lr=1", "--array", "0-1", "train.py"], "A sweep sets --array itself"),
        (["--over", "lr=1", "--as", "x", "train.py"], "'x' is not a format of arguments"),
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


@pytest.mark.ranks
@pytest.mark.slow
def test_sweep_with_a_failing_trial_is_resumed_and_extended(hpctrain, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--metric", "val_acc", "--mode", "max", "--concurrent", "2", "--backend", "local", "--json"]
    result = hpctrain(
        "sweep", "--over", "lr=0.1,0.5", *words, "--run-dir", "runs/s", "train.py", "--seed", "1"
    )
    assert json.loads(result.stdout)["trials"] == [0, 1]
    assert hpctrain("wait", "s").returncode == 4
    text = hpctrain("sweep", "status", "s").stdout
    assert text.startswith("s: 2 tasks: 1 FAILED, 1 COMPLETED\n")
    assert (
        "\ns/task-1: rank 0 on local-0: ValueError: these values do not work\n    log: runs/s/task-1" in text
    )
    assert "\nbest        val_acc 1.1 at step 3\n" in hpctrain("sweep", "best", "s").stdout

    assert "whose trials have different arguments" in hpctrain("resume", "s").stderr
    again = hpctrain("sweep", "--over", "lr=0.5", "--backend", "local", "--run-dir", "runs/s", "train.py")
    assert "already contains a sweep" in again.stderr
    (tmp_path / "mended").touch()
    result = hpctrain("sweep", "resume", "s", "--name", "again")
    assert result.stdout.startswith("Sweep s: 1 trial, job "), result.stderr
    assert hpctrain("wait", "s").returncode == 0
    assert "Nothing to resume" in hpctrain("sweep", "resume", "s").stderr
    result = hpctrain("sweep", "extend", "s", "--over", "lr=0.1,0.7", "--json")
    assert json.loads(result.stdout)["trials"] == [2], result.stderr
    assert hpctrain("wait", "s").returncode == 0

    document = json.loads(hpctrain("sweep", "status", "s", "--json").stdout)
    assert document["states"] == {"COMPLETED": 3}
    values = [(one["hparams"]["lr"], one["best"]["value"], one["attempt"]) for one in document["trials"]]
    assert values == [(0.7, 1.7, 0), (0.5, 1.5, 1), (0.1, 1.1, 0)]
    best = json.loads(hpctrain("sweep", "best", "s", "--json").stdout)
    assert (best["run_id"], best["hparams"]) == ("s/task-2", {"seed": 1, "lr": 0.7})
    spec = load_spec(RunDir(tmp_path / "runs/s").task(1).spec)
    assert (spec.args, spec.name) == (("--seed", "1", "--lr", "0.5"), "again")
