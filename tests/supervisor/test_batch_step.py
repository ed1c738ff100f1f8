"""Signals to the job steps of an adopted batch script."""

from __future__ import annotations

import pytest
from helpers.fake_slurm import FakeSlurm
from helpers.run_histories import make_spec

from hpctrain.supervisor.launch.batch import BatchStep


@pytest.mark.parametrize("still_running", [True, False])
def test_only_a_step_that_is_still_running_is_reported_after_a_failed_kill(tmp_path, capfd, still_running):
    fake = FakeSlurm(tmp_path)
    fake.answer("squeue", "19.0 train\n")
    fake.answer(
        "scancel", stderr="scancel: error: Kill job error on job step id 19.0: Invalid job id\n", code=1
    )
    if not still_running:
        # The step ends after it was listed.
        script = tmp_path / "scancel"
        script.write_text(script.read_text().replace("cat", 'printf "" > "${0%/*}/squeue.out"\ncat', 1))
    environ = {**fake.environ, "SLURM_JOB_ID": "19"}
    step = BatchStep(make_spec(), ["sleep", "60"], environ, lambda _: None)
    step.kill()
    step.close()
    assert ("cannot kill the job steps" in capfd.readouterr().out) is still_running
