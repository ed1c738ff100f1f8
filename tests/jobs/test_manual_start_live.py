"""A job's script that the user starts."""

import sys

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.jobs.submit.submit_prepared import submit_prepared


@pytest.mark.long
@pytest.mark.parametrize("backend", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
@pytest.mark.parametrize("extra_options", [{"ntasks_per_node": 2}, {"array": "0-1%2"}], ids=["run", "array"])
def test_script_started_by_hand_is_refused(backend, extra_options, tmp_path, request):
    """Two jobs in one folder would overwrite each other's checkpoints and events."""
    environ = environment(request.getfixturevalue("slurm").env if backend == "slurm" else None)
    script = tmp_path / "train.py"
    script.write_text("print('here')\n")
    options = {"backend": backend, "run_dir": "run", **extra_options}
    run, _ = submit_prepared(
        prepare_submission(script, (), options, environ=environ, cwd=tmp_path, python=sys.executable)
    )
    run.wait(timeout=120)
    folders = [each.dir for each in run.tasks() or [run]]
    before = [list(read_json_lines(folder.events)) for folder in folders]
    refused = run_command(["bash", run.dir.job_script], environ, cwd=run.dir.path, check=False, timeout=60)
    assert refused.returncode == 2
    assert "use hpctrain resume" in refused.stderr
    if backend == "slurm":
        job_id = run_command(["sbatch", "--parsable", run.dir.job_script], environ).stdout.strip()
        query = ["scontrol", "show", "job", job_id]
        wait_for(lambda: "ExitCode=2:0" in run_command(query, environ).stdout, 60, "its end")
    assert [list(read_json_lines(folder.events)) for folder in folders] == before
