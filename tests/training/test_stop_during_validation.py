"""A stop during a long validation: all ranks leave it at once, and repeat it after the restart."""

import re
from pathlib import Path

import pytest
from helpers import SCRIPTS
from test_trainer import losses, run_script

from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "train_regression.py"
SETTINGS = ["global_batch_size=8", "validate_every=3", "sanity_val_batches=0", "checkpoint_every=null"]


def train(run: Path, last_step: int, stop_at: str = "", *, ranks: int) -> dict:
    args = ["long", last_step, *SETTINGS, "patience=9", f'stop_at="{stop_at}"']
    return run_script(SCRIPT, run, *args, ranks=ranks)


def train_until_stop(run: Path, last_step: int, stop_at: str, ranks: int) -> int:
    """Train until a rank is stopped; return the number of batches that rank 0 had validated."""
    with pytest.raises(AssertionError, match="exit code 75") as error:
        train(run, last_step, stop_at, ranks=ranks)
    return int(re.search(r"validated (\d+)", str(error.value))[1])


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_stop_during_a_validation_takes_effect_at_once_and_changes_nothing(tmp_path, ranks):
    """400 samples are 50 batches of 8 on one rank, and 45 of 3 on each of three."""
    uninterrupted = train(tmp_path / "whole", 6, ranks=ranks)
    run = RunDir(tmp_path / "parts")
    # In the validation after step 3; in its repetition; and in the one after the last step.
    assert 5 <= train_until_stop(run.path, 6, f"{ranks - 1}:5", ranks) < 45
    assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith("step")] == [
        "step-00000003"
    ]
    assert 9 <= train_until_stop(run.path, 6, f"{ranks - 1}:9", ranks) < 45
    per_validation = 50 if ranks == 1 else 45
    assert (
        per_validation + 5
        <= train_until_stop(run.path, 6, f"0:{per_validation + 5}", ranks)
        < 2 * per_validation - 5
    )
    assert run.checkpoint(6).is_dir()
    assert train(run.path, 6, ranks=ranks) == uninterrupted
    assert losses(run.path) == losses(tmp_path / "whole")
