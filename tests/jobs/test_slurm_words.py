"""What the Slurm backend makes of the answers of Slurm's commands, with commands that only pretend."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.backends.slurm import SlurmBackend
from hpctrain.jobs.runs import Run
from hpctrain.jobs.slurm_command import run_slurm
from hpctrain.jobs.states import JobView, RunState, from_slurm
from hpctrain.jobs.submit import hand_over
from hpctrain.rundir import RunDir


class Commands:
    """A folder of commands that answer what a test says, and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {"PATH": f"{folder}:{os.environ['PATH']}"}
        self.answer("sinfo", "4|gpu:2(S:0-1)\n")
        self.answer("sbatch", "17\n")

    def answer(self, name: str, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(stdout)
        (self.folder / f"{name}.err").write_text(stderr)
        path = self.folder / name
        path.write_text(
            f'#!/bin/sh\necho "{name} $*" >> "${{0%/*}}/calls"\ncat "$0.out"\ncat "$0.err" >&2\nexit {code}\n'
        )
        path.chmod(0o755)

    @property
    def calls(self) -> str:
        path = self.folder / "calls"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def commands(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    return Commands(folder)


def row(job: str, state: str, restarts: int = 0, reason: str = "None") -> str:
    return f"{job:<24}{state:<24}{restarts:<12}{reason:<60}\n"


def look(commands: Commands, *jobs: str) -> list[JobView]:
    return SlurmBackend(commands.environ).look([(job, RunDir(commands.folder)) for job in jobs])


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("RUNNING", RunState.RUNNING),
        ("COMPLETING", RunState.RUNNING),
        ("PENDING", RunState.PENDING),
        ("CANCELLED by 1000", RunState.CANCELLED),
        ("CANCELLED+", RunState.CANCELLED),
        ("NODE_FAIL", RunState.FAILED),
        ("TIMEOUT", RunState.FAILED),
        ("COMPLETED", RunState.COMPLETED),
        ("QUANTUM", RunState.UNKNOWN),
        ("", RunState.UNKNOWN),
    ],
)
def test_states_of_slurm(words, state):
    assert from_slurm(words) is state


def test_queued_jobs_are_asked_for_at_once(commands):
    commands.answer(
        "squeue",
        row("17", "RUNNING") + row("18", "PENDING", 1, "BeginTime") + row("19", "PENDING", 0, "Priority"),
    )
    assert look(commands, "17", "18", "19") == [
        JobView(RunState.RUNNING),
        JobView(RunState.PENDING, "BeginTime", held=True),
        JobView(RunState.PENDING, "Priority"),
    ]
    assert commands.calls.count("squeue") == 1


def test_a_job_that_waits_for_its_begin_time_for_the_first_time_is_not_held_by_a_requeue(commands):
    commands.answer("squeue", row("17", "PENDING", 0, "BeginTime"))
    assert not look(commands, "17")[0].held


def test_an_unreachable_controller_means_unknown_never_dead(commands):
    commands.answer("squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    (view,) = look(commands, "17")
    assert view.state is RunState.UNKNOWN
    assert "Unable to contact slurm controller" in view.words


def test_accounting_tells_of_a_job_that_left_the_queue(commands):
    commands.answer("squeue", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    commands.answer("sacct", "NODE_FAIL\n")
    assert look(commands, "17") == [JobView(RunState.FAILED, "Slurm says NODE_FAIL")]


def test_without_accounting_the_controller_remembers(commands):
    commands.answer("squeue")
    commands.answer("sacct", stderr="Slurm accounting storage is disabled\n", code=1)
    commands.answer(
        "scontrol",
        "JobId=17 JobName=x JobState=COMPLETED\n   JobState=TIMEOUT Reason=TimeLimit Dependency=\n",
    )
    assert look(commands, "17") == [JobView(RunState.FAILED, "Slurm says TIMEOUT")]
    commands.answer("scontrol", stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    assert look(commands, "17") == [JobView(RunState.FAILED, "Slurm no longer knows job 17")]
    commands.answer("scontrol", stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1)
    assert look(commands, "17")[0].state is RunState.UNKNOWN


@pytest.mark.parametrize(
    ("finished", "view", "cancel", "state"),
    [
        ("COMPLETED", None, False, RunState.COMPLETED),
        ("FAILED", None, False, RunState.FAILED),
        (None, "RUNNING", False, RunState.RUNNING),
        (None, "NODE_FAIL", False, RunState.FAILED),
        (None, "NODE_FAIL", True, RunState.CANCELLED),
        (None, "CANCELLED by 0", False, RunState.CANCELLED),
        (None, "COMPLETED", False, RunState.FAILED),
    ],
)
def test_the_run_knows_better_than_the_scheduler(commands, tmp_path, finished, view, cancel, state):
    run = Run(RunDir(tmp_path / "r"), commands.environ)
    run.dir.path.mkdir()
    # An earlier submission's end must not count.
    run.dir.log_event("finished", 0, state="FAILED", cause="old")
    run.dir.log_event("submitted", 1, job_id="17", backend="slurm")
    if cancel:
        run.dir.cancel_request.touch()
    if finished:
        run.dir.log_event("finished", 1, state=finished, cause="new")
    commands.answer("squeue", row("17", view or "RUNNING") if view == "RUNNING" else "")
    commands.answer("sacct", f"{view}\n")
    status = run.status()
    assert status.state is state
    assert status.cause == (
        None if state is not RunState.FAILED else "new" if finished else f"Slurm says {view}"
    )


def test_an_end_written_between_the_two_looks_counts(commands, tmp_path):
    run = Run(RunDir(tmp_path / "r"), commands.environ)
    run.dir.path.mkdir()
    run.dir.log_event("submitted", 0, job_id="17", backend="slurm")
    commands.answer("squeue")
    event = '{"time": 1, "attempt": 0, "kind": "finished", "state": "COMPLETED"}'
    sacct = commands.folder / "sacct"
    sacct.write_text(f"#!/bin/sh\necho '{event}' >> '{run.dir.events}'\necho COMPLETED\n")
    sacct.chmod(0o755)
    assert run.status().state is RunState.COMPLETED


def test_a_refusal_is_in_slurms_own_words_and_leaves_no_folder(commands, prepared, tmp_path):
    words = (
        "sbatch: error: invalid partition specified: big\nsbatch: error: Batch job submission failed: no\n"
    )
    commands.answer("sbatch", stderr=words, code=1)
    with pytest.raises(
        SchedulerError, match="invalid partition specified: big; Batch job submission failed: no"
    ):
        hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("how", ["it hangs", "Socket timed out on send/recv operation"])
def test_where_the_answer_is_lost_the_job_may_be_queued(commands, prepared, tmp_path, monkeypatch, how):
    submission = prepared(backend="slurm", run_dir="r", name="a b", environ=commands.environ)
    if how == "it hangs":
        monkeypatch.setitem(run_slurm.__kwdefaults__, "timeout_s", 0.2)
        (commands.folder / "sbatch").write_text("#!/bin/sh\nexec sleep 20\n")
    else:
        commands.answer("sbatch", stderr=f"sbatch: error: Batch job submission failed: {how}\n", code=1)
    with pytest.raises(SchedulerError, match="may be queued: look with `squeue --me --name='a b'`"):
        hand_over(submission)
    assert (tmp_path / "r" / "spec.yaml").exists()
    assert (tmp_path / "r" / "job.sbatch").exists()


def test_a_job_that_cannot_be_recorded_keeps_its_folder(commands, prepared, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "log_event", fail)
    with pytest.raises(SchedulerError, match=r"Job 17 is submitted, but .*No space left"):
        hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))
    assert (tmp_path / "r" / "spec.yaml").exists()


def test_an_end_that_workers_were_started_after_is_none(commands, tmp_path):
    run = Run(RunDir(tmp_path / "r"), commands.environ)
    run.dir.path.mkdir()
    run.dir.log_event("submitted", 0, job_id="17", backend="slurm")
    run.dir.log_event("finished", 0, state="FAILED", cause="old")
    run.dir.log_event("started", 1)
    commands.answer("squeue", row("17", "RUNNING", 1))
    assert run.status().state is RunState.RUNNING


def test_the_newest_checkpoint_is_one_that_was_committed(commands, tmp_path):
    run = Run(RunDir(tmp_path / "r"), commands.environ)
    for step in (10, 20, 30):
        run.dir.checkpoint(step).mkdir(parents=True)
    assert run.status().checkpoint is None
    for step in (10, 20):
        (run.dir.checkpoint(step) / "manifest.json").touch()
    assert run.status().checkpoint == str(run.dir.checkpoint(20))


def test_a_job_in_the_queue_is_still_going(commands, prepared):
    hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))
    commands.answer("squeue", row("17", "PENDING", 0, "Priority"))
    with pytest.raises(SpecError, match="still going"):
        hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))
    commands.answer("squeue", stderr="Unable to contact slurm controller", code=1)
    with pytest.raises(SchedulerError, match="cannot be told"):
        hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))
    commands.answer("squeue", "")
    commands.answer("sacct", "FAILED\n")
    hand_over(prepared(backend="slurm", run_dir="r", environ=commands.environ))


def test_sbatch_of_several_clusters_names_one(commands, prepared):
    commands.answer("sbatch", "sbatch: lua: hello\n17;north\n")
    assert hand_over(prepared(backend="slurm", environ=commands.environ)).job_id == "17"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus_per_node": 8}, "8 GPUs .* no node of the cluster has more than 4"),
        ({"gpus_per_node": 4, "nodes": 3}, r"3 nodes with 4 GPUs .* has 2"),
        ({"gpus_per_node": 4, "partition": "big"}, "partition big has more than 2"),
    ],
)
def test_more_gpus_than_the_cluster_has(commands, prepared, options, words):
    commands.answer("sinfo", "3|gpu:a100:2(S:0-1),shard:8\n2|gpu:a100:3(S:0),gpu:v100:1\n9|(null)\n")
    if "partition" in options:
        commands.answer("sinfo", "3|gpu:2\n")
    with pytest.raises(SpecError, match=words):
        prepared(backend="slurm", environ=commands.environ, **options)


def test_auto_takes_slurm_where_it_answers(commands, prepared):
    assert prepared(backend="auto", environ=commands.environ).spec.backend == "slurm"
    commands.answer("sinfo", stderr="sinfo: fatal: Could not establish a configuration source\n", code=1)
    submission = prepared(backend="auto", environ=commands.environ)
    assert submission.spec.backend == "local"
    assert "sinfo says: Could not establish a configuration source" in submission.notes[0]
