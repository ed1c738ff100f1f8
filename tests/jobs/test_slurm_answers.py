"""Reactions of a submission to answers of fake Slurm commands."""

import os
import signal

import pytest
from helpers.fake_slurm import queued, recorded

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends import choose_backend
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.slurm import job_requests
from hpctrain.slurm.command import run_slurm


@pytest.mark.parametrize("failure", ["it hangs", "Socket timed out on send/recv operation"])
def test_lost_answer_of_sbatch_keeps_the_folder(fake_slurm, prepared, tmp_path, monkeypatch, failure):
    submission = prepared(backend="slurm", run_dir="r", name="a b", environ=fake_slurm.environ)
    if failure == "it hangs":
        monkeypatch.setitem(run_slurm.__kwdefaults__, "timeout_s", 0.2)
        (fake_slurm.folder / "sbatch").write_text("#!/bin/sh\nexec sleep 20\n")
    else:
        fake_slurm.answer("sbatch", stderr=f"sbatch: error: Batch job submission failed: {failure}\n", code=1)
    with pytest.raises(SchedulerError, match="Check with `squeue --me --name='a b'`"):
        submit_prepared(submission)
    assert (tmp_path / "r" / "spec.yaml").exists()
    assert (tmp_path / "r" / "job.sbatch").exists()


def test_queued_job_is_active(fake_slurm, prepared):
    submit_prepared(prepared(backend="slurm", run_dir="r", environ=fake_slurm.environ))
    fake_slurm.answer("squeue", queued("17", "PENDING", reason="Priority"))
    with pytest.raises(SpecError, match="still active"):
        submit_prepared(prepared(backend="slurm", run_dir="r", environ=fake_slurm.environ))
    fake_slurm.answer("squeue", stderr="Unable to contact slurm controller", code=1)
    with pytest.raises(SchedulerError, match="whether run r is still active"):
        submit_prepared(prepared(backend="slurm", run_dir="r", environ=fake_slurm.environ))
    fake_slurm.answer("squeue", "")
    fake_slurm.answer("sacct", recorded("17", "FAILED"))
    submit_prepared(prepared(backend="slurm", run_dir="r", environ=fake_slurm.environ))


def test_cancel_refused_by_slurm_does_not_take_effect_later(fake_slurm, prepared):
    """A remaining request would make the supervisor end the run at its next preemption."""
    run, _ = submit_prepared(prepared(backend="slurm", environ=fake_slurm.environ, run_dir="r"))
    fake_slurm.answer("squeue", queued("17", "RUNNING", workdir=str(run.dir.path)))
    fake_slurm.answer("scancel", stderr="scancel: error: Kill job error on job id 17: Busy\n", code=1)
    with pytest.raises(SchedulerError, match="Busy"):
        run.cancel()
    assert not run.dir.cancel_request.exists()
    fake_slurm.answer("scancel")
    run.cancel()
    assert run.dir.cancel_request.exists()


def test_job_id_of_a_multi_cluster_sbatch_is_parsed(fake_slurm, prepared):
    fake_slurm.answer("sbatch", "sbatch: lua: hello\n17;north\n")
    assert submit_prepared(prepared(backend="slurm", environ=fake_slurm.environ))[1] == "17"


def test_configuration_is_read_although_the_ping_after_it_is_refused():
    config = "KillWait = 7 sec\n\nSlurmctld(primary) at n1 is DOWN\n"
    assert run_slurm(["sh", "-c", f"printf '{config}'; exit 1"], os.environ) == config
    with pytest.raises(SchedulerError, match="sh failed: no"):
        run_slurm(["sh", "-c", f"printf '{config}'; echo no >&2; exit 1"], os.environ)


@pytest.mark.slow
def test_signal_without_an_answer_has_arrived_if_the_step_ends(fake_slurm, monkeypatch):
    """If a task is requeued while scancel signals its step, scancel 22.05 repeats the signal for a minute."""
    monkeypatch.setattr(job_requests, "_SIGNAL_LIMIT_S", 0.5)
    monkeypatch.setattr(job_requests, "_STEP_LIMIT_S", 1.0)
    fake_slurm.answer("squeue", "249_1.0 hpctrain-ranks-0\n")
    sent, listed = fake_slurm.folder / "sent", fake_slurm.folder / "squeue"
    scancel = fake_slurm.folder / "scancel"
    scancel.write_text(f"#!/bin/sh\necho >>{sent}\nexec sleep 20\n")
    scancel.chmod(0o755)
    with pytest.raises(SchedulerError, match="scancel did not respond"):
        job_requests.signal_ranks(["249_1"], signal.SIGTERM, fake_slurm.environ)
    assert sent.read_text() == "\n"  # sent once
    scancel.write_text(f"#!/bin/sh\necho '#!/bin/sh' >{listed}\nexec sleep 20\n")
    job_requests.signal_ranks(["249_1"], signal.SIGTERM, fake_slurm.environ)


@pytest.mark.parametrize("trouble", ["Munge encode failed: Failed to connect", "Connection refused"])
def test_training_does_not_start_beside_a_broken_slurm(fake_slurm, trouble):
    fake_slurm.answer("sinfo", stderr=f"slurm_load_partitions: {trouble}\n", code=1)
    with pytest.raises(SchedulerError, match=f"Slurm is set up on this machine but .*{trouble}"):
        choose_backend("auto", fake_slurm.environ)


@pytest.mark.slow
def test_busy_controller_is_awaited(fake_slurm):
    sinfo = fake_slurm.folder / "sinfo"
    sinfo.write_text(sinfo.read_text().replace("\n", "\nsleep 7\n", 1))
    assert choose_backend("auto", fake_slurm.environ)[0].name == "slurm"
