"""A sweep on a real Slurm."""

from dataclasses import replace

import pytest
from helpers.commands import environment, run_command

from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.slurm.states import RunState
from hpctrain.sweeps.sweep_record import SweepRecord, read_sweep


@pytest.mark.extended
def test_sweep_is_extended_while_it_is_pending(prepared, slurm):
    """With fake supervisors."""
    environ = environment(slurm.env)
    small = SweepRecord(args=(), space={"n": "0:2"}, folder="/").with_trials()
    options = {"run_dir": "s", "backend": "slurm", "environ": environ}
    sweep, _ = submit_prepared(
        prepared(array=small.array([0, 1]), sbatch={"hold": ""}, **options), sweep=small
    )
    large = replace(small, space={"n": "0:3"}).with_trials()
    submit_prepared(prepared(array=large.array([2]), **options), sweep=large)
    assert sweep.tasks()[2].wait(timeout=120).state is RunState.COMPLETED
    assert sweep.status().tasks == {"PENDING": 2, "COMPLETED": 1}
    run_command(["scontrol", "release", sweep.tasks()[0].job_id.partition("_")[0]], environ)
    assert sweep.wait(timeout=120).tasks == {"COMPLETED": 3}
    assert [load_spec(task.dir.spec).args for task in sweep.tasks()] == [("--n", str(n)) for n in range(3)]
    assert read_sweep(sweep.dir) == large
