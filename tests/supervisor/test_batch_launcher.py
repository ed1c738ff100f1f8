"""The process of an adopted batch script, and the end of its job steps."""

import queue
import signal

import pytest
from helpers.run_histories import make_spec

from hpctrain.errors import SchedulerError
from hpctrain.slurm.srun_step import StepEnded
from hpctrain.supervisor.launch import batch
from hpctrain.supervisor.launch.batch import BatchLauncher, BatchStep


@pytest.mark.parametrize("failures", [2, 1000])
def test_job_steps_end_or_are_abandoned_if_the_controller_does_not_respond(
    monkeypatch, tmp_path, capfd, failures
):
    num_queries = 0
    signalled = []

    def list_steps(*_: object) -> list[str]:
        nonlocal num_queries
        num_queries += 1
        if num_queries <= failures:
            raise SchedulerError("squeue did not respond within 10 s")
        return ["7.0"]

    monkeypatch.setattr(batch, "list_steps", list_steps)
    monkeypatch.setattr(batch, "signal_steps", lambda steps, number, _: signalled.append((*steps, number)))
    monkeypatch.setattr(batch, "_KILL_LIMIT_S", 0.5)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    spec = make_spec(tmp_path, program="batch", backend="slurm")
    step = BatchStep(spec, ["sleep", "100"], {"SLURM_JOB_ID": "7"}, events.put)
    step.kill()
    assert isinstance(events.get(timeout=30), StepEnded)
    step.close()
    if failures == 2:
        assert signalled == [("7.0", signal.SIGKILL)]
    else:
        assert (
            "cannot end the job steps of the batch script: squeue did not respond" in capfd.readouterr().out
        )


@pytest.mark.parametrize("exported", ["NONE", "A,B", "ALL,A=b"])
def test_job_steps_are_observed_whatever_the_script_exports(tmp_path, exported):
    variables = {"HPCTRAIN_ATTEMPT": "0", "HPCTRAIN_SUPERVISOR_ADDRESS": "x"}
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_EXPORT_ENV": exported}
    launcher = BatchLauncher(make_spec(tmp_path, program="batch", backend="slurm"), environ)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    out = tmp_path / "out"
    launcher.start(["sh", "-c", f"echo $SLURM_EXPORT_ENV >{out}"], variables, events.put)
    events.get(timeout=30)
    ours = "HPCTRAIN_ATTEMPT,HPCTRAIN_SUPERVISOR_ADDRESS,HPCTRAIN_COMMAND,PYTHONPATH"
    expected = {"NONE": ours, "A,B": f"A,B,{ours}"}.get(exported, exported)
    assert out.read_text() == f"{expected}\n"
