"""The process of an adopted batch script, and the end of its job steps."""

import os
import queue
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.run_histories import make_spec
from helpers.waiting import wait_for
from msgspec.structs import replace

from hpctrain.cluster.processes import child_pids, stat_fields
from hpctrain.errors import SchedulerError
from hpctrain.jobs.runs.run_log_reader import LogFilter, LogText, RunLogReader
from hpctrain.rundir import RunDir
from hpctrain.slurm import job_requests
from hpctrain.slurm.srun_step import StepEnded, TaskExit
from hpctrain.supervisor.launch.job_step import SignalReceived
from hpctrain.supervisor.workers import batch_launcher
from hpctrain.supervisor.workers.batch_launcher import BatchLauncher, BatchStep
from hpctrain.supervisor.workers.observed_groups import Survival


def no_groups() -> Any:
    outside, ask = False, threading.Event()
    return SimpleNamespace(
        stop=bool, has_ranks=bool, has_ranks_outside_steps=outside, survival=Survival, ask_to_stop=ask
    )


@pytest.mark.parametrize("failures", [2, 1000])
def test_job_steps_end_or_are_abandoned_if_the_controller_does_not_respond(
    monkeypatch, tmp_path, caplog, failures
):
    """The next attempt does not start before they have ended, so only one writes checkpoints."""
    answers = [["7.0"], ["7.0"], []]
    num_queries = 0
    signalled = []

    def list_steps(*_: object) -> list[str]:
        nonlocal num_queries
        num_queries += 1
        if num_queries <= failures:
            raise SchedulerError("squeue did not respond within 10 s")
        return answers.pop(0)

    monkeypatch.setattr(job_requests, "list_steps", list_steps)
    monkeypatch.setattr(
        job_requests, "signal_steps", lambda steps, number, _: signalled.append((*steps, number))
    )
    monkeypatch.setattr(job_requests, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(batch_launcher, "_KILL_LIMIT_S", 60.0 if failures == 2 else 0.5)
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    spec = make_spec(tmp_path, program="batch", backend="slurm")
    groups = no_groups()
    # Not while the steps are killed: a process that the script left running has not survived then.
    groups.survival = lambda: Survival(until=float(num_queries))
    step = BatchStep(spec, ["sleep", "100"], {"SLURM_JOB_ID": "7"}, events.put, groups)
    step.kill()
    assert isinstance(events.get(timeout=90), StepEnded)
    assert step.survival.until == 0
    step.close()
    if failures == 2:
        assert signalled == [("7.0", signal.SIGKILL)] * 2
        assert answers == []
    else:
        assert "could not end all job steps" in caplog.text


@pytest.mark.parametrize(
    ("script", "files"),
    [
        ("touch begun; sleep 1; touch next", []),
        ("trap 'touch handled; exit' TERM; touch begun; sleep 1; touch next", ["handled"]),
        ("trap 'touch handled' TERM; touch begun; sleep 1; touch next", ["handled", "next"]),
        # The script has become the rank, which could not stop if it were suspended.
        ('touch begun; exec python3 -c \'import time; time.sleep(1); open("next", "w")\'', ["next"]),
    ],
)
def test_script_ends_after_its_ranks_instead_of_running_its_next_lines(tmp_path, script, files):
    """As after the time limit, when Slurm sends SIGTERM to the script."""
    spec = replace(make_spec(tmp_path, program="batch", backend="local"), workdir=str(tmp_path))
    groups = no_groups()
    stopped = threading.Event()
    groups.stop, groups.has_ranks = lambda number: None, lambda: not stopped.is_set()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    step = BatchStep(spec, ["bash", "-c", script], dict(os.environ), events.put, groups)
    wait_for((tmp_path / "begun").exists, 20, "the start of the script")
    time.sleep(0.3)
    step.signal(signal.SIGTERM)
    stopped.set()
    while not isinstance(events.get(timeout=20), StepEnded):
        pass
    step.close()
    (tmp_path / "begun").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("slurm_signal", "preempted", "left_s", "is_stop"),
    [
        ("", True, 9000.0, True),
        # The script itself stops its ranks, for example at its own signal.
        ("", False, 60.0, False),
        ("B:USR1@60", False, 60.0, False),
        ("USR2@60", False, 60.0, True),
        ("USR2@60", False, 9000.0, False),
    ],
)
def test_script_is_suspended_while_slurm_is_asked_why_a_rank_stops(
    monkeypatch, tmp_path, slurm_signal, preempted, left_s, is_stop
):
    queried = []

    def query_job(job_id, environ, timeout_s=60.0):
        if child.returncode is None and not queried:
            wait_for(lambda: stat_fields(child.pid)[0] == "T", 20, "the suspension")
        queried.append(job_id)
        return SimpleNamespace(preempted=preempted, is_ending=False)

    monkeypatch.setattr(batch_launcher, "query_job", query_job)
    monkeypatch.setattr(batch_launcher, "query_seconds_left", lambda job_id, environ: left_s)
    monkeypatch.setattr(batch_launcher, "kill_steps", lambda *_: None)
    spec = make_spec(tmp_path, program="batch", backend="slurm")
    spec = replace(spec, directives={"signal": slurm_signal} if slurm_signal else {}, stop_before_limit_s=60)
    groups = no_groups()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    script = ["sh", "-c", "sleep 0.5; sleep 0.5"]
    step = BatchStep(spec, script, {**os.environ, "SLURM_JOB_ID": "7"}, events.put, groups)
    child = step._processes[0]
    wait_for(lambda: child_pids(child.pid), 20, "the start of the script")
    groups.ask_to_stop.set()
    first = events.get(timeout=20)
    assert queried[0] == "7"
    assert (first == SignalReceived(signal.SIGTERM)) is is_stop
    assert isinstance(first, SignalReceived if is_stop else TaskExit)
    step.kill()
    step.close()


@pytest.mark.parametrize("exported", ["NONE", "A,B", "ALL,A=b"])
def test_job_steps_are_observed_whatever_the_script_exports(tmp_path, exported):
    variables = {"HPCTRAIN_ATTEMPT": "0", "HPCTRAIN_SUPERVISOR_ADDRESS": "x"}
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_EXPORT_ENV": exported}
    launcher = BatchLauncher(make_spec(tmp_path, program="batch", backend="slurm"), environ)
    launcher.groups = no_groups()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    out = tmp_path / "out"
    launcher.start(["sh", "-c", f"echo $SLURM_EXPORT_ENV >{out}"], variables, events.put)
    events.get(timeout=30)
    ours = "HPCTRAIN_ATTEMPT,HPCTRAIN_SUPERVISOR_ADDRESS,HPCTRAIN_COMMAND,PYTHONPATH"
    expected = {"NONE": ours, "A,B": f"A,B,{ours}"}.get(exported, exported)
    assert out.read_text() == f"{expected}\n"


def test_attempts_in_one_file_are_shown_once_each(tmp_path):
    """The logs of the attempts are links to the file of the job."""
    run = RunDir(tmp_path / "run")
    launcher = BatchLauncher(make_spec(run.path, program="batch", backend="local"), {})
    launcher.groups = no_groups()
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    followed = RunLogReader(run, LogFilter(), whole=True)
    seen: list[str] = []

    def read(reader: RunLogReader, *, rest: bool = False) -> str:
        items = [*reader.read(), *(reader.read_rest() if rest else [])]
        return "".join(item.text for item in items if isinstance(item, LogText))

    stdout = os.dup(1)
    with open(tmp_path / "job.out", "ab") as output:
        os.dup2(output.fileno(), 1)
        try:
            for attempt in (0, 1):
                run.attempt_logs(attempt).mkdir(parents=True)
                words = f"printf 'line {attempt}\\nend {attempt}'"
                launcher.start(["sh", "-c", words], {"HPCTRAIN_ATTEMPT": str(attempt)}, events.put)
                while not isinstance(events.get(timeout=30), StepEnded):
                    pass
                seen.append(read(followed))
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    assert [*seen, read(followed, rest=True)] == ["line 0\nend 0", "line 1\nend 1", ""]
    for attempt in (0, 1):
        reader = RunLogReader(run, LogFilter(attempt=attempt), whole=False)
        assert read(reader, rest=True) == f"line {attempt}\nend {attempt}"
