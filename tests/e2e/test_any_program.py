"""Programs without hpctrain on two nodes with two ranks each, preempted, killed and hung."""

import re
import sys
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, preempt
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

FOLDER = SCRIPTS / "any_program"
SHAPE = ["--nodes=2", "--ntasks-per-node=2", "--env=OMP_NUM_THREADS=1", "--standby-workers=never"]
PROGRAMS = {
    "plain DDP": [FOLDER / "plain_ddp.py"],
    "Lightning": [FOLDER / "with_lightning.py"],
    "Hugging Face": [FOLDER / "with_huggingface.py"],
    "Accelerate": [FOLDER / "with_accelerate.py"],
    "module": ["-m", "any_program.ddp"],
    "shell script": ["--", FOLDER / "train.sh"],
}
#: Programs with their own loop, which saves every five steps.
OWN_LOOP = ("plain DDP", "module")


def submit(slurm, tmp_path: Path, program: str, *options: str) -> Run:
    """Submit the program, and wait until it has saved a checkpoint."""
    run = Run(tmp_path / "run", {**slurm.env, "PYTHONPATH": str(SCRIPTS)})
    python = ["--env", f"PYTHON={sys.executable}", "--env", "PYTHONPATH"]
    words = [*SHAPE, *python, *options, "--run-dir", str(run.path), *map(str, PROGRAMS[program])]
    run.hpctrain("submit", *words, cwd=SCRIPTS)
    # Lightning's script resumes from the last file that its first save writes.
    first = "last.ckpt" if program == "Lightning" else "*"
    wait_for(lambda: any(run.dir.checkpoints.glob(first)), 150, f"the first checkpoint of the {program}")
    return run


def assert_finished(run: Run) -> None:
    assert run.wait() == 0, run.describe()
    assert "finished after 60 steps" in run.dir.rank_log(max(run.dir.attempts()), 0).read_text()
    assert_no_process_left(run.path)
    # One that saves its position continues from it, and its steps are on record.
    assert run.status()["step"] == 60
    assert len({record["attempt"] for record in read_json_lines(run.dir.metrics)}) == 2
    assert run.events("resumed")[-1]["step"] > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_preempted_program_continues(slurm, tmp_path, program):
    run = submit(slurm, tmp_path, program)
    preempt(slurm.env, seconds=1)
    assert_finished(run)
    assert run.events("failure") == []
    assert len(run.events("requeue")) == 1
    if program in OWN_LOOP:
        # Data workers did not end before the agreed step. The program saves a step after the optimizer's.
        (last,) = re.findall(r"all ranks exit after step (\d+) of", run.dir.rank_log(0, 0).read_text())
        assert [event["step"] for event in run.events("resumed")] == [(int(last) - 1) // 5 * 5]


@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_rank_is_named_and_the_program_restarted(slurm, tmp_path, program):
    run = submit(slurm, tmp_path, program)
    run.kill_rank(2)
    assert_finished(run)
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("killed", 2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_hung_rank_is_named_and_the_program_restarted(slurm, tmp_path, program):
    run = submit(slurm, tmp_path, program, "--env=HANG=1", "--hang-timeout=5")
    assert_finished(run)
    (failure,) = run.events("failure")
    assert failure["class"] == "hang"
    assert failure["rank"] == 3
    assert "is in sleep_forever (pace.py:" in failure["cause"]
