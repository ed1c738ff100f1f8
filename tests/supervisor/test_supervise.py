"""The supervisor over several attempts, with a fake launcher and fake job control."""

import json
import os
import signal
import subprocess
from types import SimpleNamespace
from typing import ClassVar

import pytest
from helpers.run_histories import make_spec

from hpctrain.errors import EXIT_CONTINUE, RunFailed, SchedulerError, SilentCorruption, Suspect
from hpctrain.files import read_json_lines
from hpctrain.rundir import VERIFIED_STEP_VARIABLE, RunDir
from hpctrain.runtime.failure_file import failure_record
from hpctrain.slurm.srun_step import StepEnded, TaskExit
from hpctrain.supervisor import requeuer
from hpctrain.supervisor.batch_main import main
from hpctrain.supervisor.failures import diagnosis
from hpctrain.supervisor.launch.job_step import HangDetected, RankSignalled
from hpctrain.supervisor.policy.job_intent import JobDisposition
from hpctrain.supervisor.supervise import Supervisor
from hpctrain.supervisor.workers.node_steps import StagePlan

KILLED = [TaskExit(1, None, signal.SIGKILL), StepEnded(137)]
STOPPED = [TaskExit(0, 75), TaskExit(1, 75), StepEnded(75)]
DONE = [StepEnded(0)]


class FakeStep:
    def signal(self, number):
        raise AssertionError("nothing to signal")

    kill = close = lambda self: None


class FakeLauncher:
    """Each start emits the next of `attempts`: events, or functions to call before them."""

    address = "127.0.0.1"

    def __init__(self, attempts):
        self.hosts, self.spares = ["n1", "n2"], []
        self.attempts = list(attempts)

    def start(self, command, variables, emit):
        for event in self.attempts.pop(0):
            if callable(event):
                event(variables, emit)
            else:
                emit(event)
        return FakeStep()


class FakeJob:
    """A job that is requeued at once, in this process, unless `refuses` is set."""

    job_id = "7"
    ends_job_at = None
    on_signal: ClassVar = {}
    cancel_signals = frozenset()
    nodes = successors = None

    def __init__(self, refuses=False, disposition=JobDisposition.STAYS, site_requeues=True, **parts):
        self.refuses, self.site_requeues = refuses, site_requeues
        self.later_disposition = disposition
        self.num_requeues = 0
        self.__dict__.update(parts)

    def disposition(self):
        is_over = self.num_requeues or self.later_disposition is JobDisposition.EVICTED
        return self.later_disposition if is_over else JobDisposition.STAYS

    def can_requeue(self):
        return self.site_requeues

    def seconds_left(self):
        return None

    def requeue(self):
        self.num_requeues += 1
        if self.refuses:
            raise SchedulerError("scontrol says: Requeue is disabled")
        return False


class FakeNodes:
    def __init__(self, lost=None, fits=False, shrinks=True):
        self.lost_ones, self.fits, self.shrinks, self.kept = lost or {}, fits, shrinks, []

    def lost(self, hosts):
        return {host: reason for host, reason in self.lost_ones.items() if host in hosts}

    def can_reallocate(self, excluded_hosts):
        return self.fits

    def shrink_to(self, hosts):
        self.kept.append(hosts)
        if not self.shrinks:
            raise SchedulerError("scontrol says: Job shrink disabled")

    def kill_steps(self):
        pass


class FakeSuccessors:
    lease = SimpleNamespace(acquire=lambda predecessor, deaths: None)

    def __init__(self, successor=None, predecessor=None, restarts=0):
        self.successor, self.predecessor, self.continued = successor, predecessor, []
        self.restarts = restarts

    def find_requeue(self, since):
        return since + 1, "requeued"

    def submit(self, attempt, changes):
        self.continued.append(attempt)
        if self.successor is None:
            raise SchedulerError("sbatch says: Access denied")
        return self.successor

    def find(self):
        return self.successor


def job_with_successor():
    """Return a job on a site that does not requeue; job 8 continues it."""
    return FakeJob(site_requeues=False, successors=FakeSuccessors("8"))


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    return run


def spec_of(run, **fields):
    return make_spec(run.path, nodes=2, **fields)


def supervise(run, attempts, job=None, spares=(), **fields):
    spec = spec_of(run, **fields)
    launcher = FakeLauncher(attempts)
    launcher.spares = list(spares)
    code = Supervisor(run, spec, launcher, job or FakeJob()).run()
    assert launcher.attempts == []
    return code


def kinds(run):
    return [event["kind"] for event in read_json_lines(run.events)][1:]


def events_of(run, kind):
    return [event for event in read_json_lines(run.events) if event["kind"] == kind]


def finished(run):
    return events_of(run, "finished")[0]


def failure_of(run):
    return events_of(run, "failure")[0]


@pytest.mark.parametrize(("kind", "next_event"), [("preempted", "requeue"), ("killed", "restart")])
def test_supervisor_killed_before_releasing_the_nodes_releases_them(run, kind, next_event):
    run.log_event("started", run.new_attempt(), nodes=2, world_size=2, hosts=["n1", "n2"])
    run.log_event("requeue", 0, seconds=9.0, by="successor", **{"class": kind})
    launcher = FakeLauncher([DONE] if next_event == "restart" else [])
    Supervisor(run, spec_of(run), launcher, job_with_successor()).run(deaths=1)
    assert kinds(run)[:4] == ["started", "requeue", "failure", next_event]
    assert launcher.attempts == []


@pytest.mark.parametrize("is_recorded", [False, True])
def test_requeued_job_records_the_requeue_unless_its_supervisor_has(run, is_recorded):
    run.log_event("started", run.new_attempt(), time=1.0, nodes=2, world_size=2, hosts=["n1", "n2"])
    if is_recorded:
        run.log_event("requeue", 0, seconds=9.0, by="requeue", **{"class": "preempted"})
    assert supervise(run, [DONE], FakeJob(successors=FakeSuccessors(restarts=1))) == 0
    assert kinds(run) == ["started", "requeue", "started", "finished"]
    if not is_recorded:
        requeue = {"by": "slurm", "cause": "requeued", "seconds": 1.0}
        assert events_of(run, "requeue") == [{"time": 2.0, "attempt": 0, "kind": "requeue", **requeue}]


def test_script_that_requeues_itself_ends_after_eleven_starts_without_progress(run):
    for attempt in range(6 + 11 + 1):
        if attempt == 6:
            run.checkpoints.mkdir()
            (run.checkpoints / "own.pt").touch()
        successors = FakeSuccessors(restarts=attempt)
        job = FakeJob(disposition=JobDisposition.REQUEUED, num_requeues=1, successors=successors)
        code = supervise(run, [] if attempt == 17 else [STOPPED], job)
        assert code == (RunFailed.exit_code if attempt == 17 else EXIT_CONTINUE)
    assert [saved["path"] for saved in events_of(run, "checkpoint")] == [str(run.checkpoints / "own.pt")]
    (end,) = events_of(run, "finished")
    assert "11 consecutive attempts were stopped soon after their start" in end["cause"]


class StagingLauncher(FakeLauncher):
    """Records the program and the nodes of each step, which ends at once."""

    def __init__(self):
        super().__init__([])
        self.started = []

    def start(self, command, variables, emit):
        self.started.append(("remove" if any("rm -rf" in word for word in command) else "copy", self.hosts))
        emit(StepEnded(0))
        return FakeStep()


def test_next_supervisor_removes_the_copies_of_a_killed_one(run):
    run.log_event("started", run.new_attempt(), nodes=2, world_size=2, hosts=["n1", "n2"])
    run.log_event("requeue", 0, seconds=9.0, by="successor", **{"class": "preempted"})
    spec = spec_of(run, stage={"data": "/data"})
    plan, launcher = StagePlan.create(spec, {}), StagingLauncher()
    Supervisor(run, spec, FakeLauncher([]), job_with_successor(), staging=(plan, launcher)).run(deaths=1)
    assert launcher.started == [("remove", ["n1", "n2"])]


@pytest.mark.parametrize(
    ("end", "between"), [(KILLED, ["failure", "restart"]), (STOPPED, ["requeue"])], ids=["crash", "stop"]
)
def test_run_continues_after_a_crash_or_a_stop_and_completes(run, end, between):
    assert supervise(run, [end, DONE]) == 0
    assert kinds(run) == ["started", *between, "started", "finished"]
    assert finished(run)["state"] == "COMPLETED"
    assert run.failure(0, 1).exists() is (end is KILLED)


def test_orphans_are_killed_when_the_supervisor_itself_fails(run):
    orphans = []

    def fail(variables, _emit):
        environ = {**os.environ, **variables}
        orphans.append(subprocess.Popen(["sleep", "60"], env=environ, start_new_session=True))
        raise RuntimeError("Resource temporarily unavailable")

    with pytest.raises(RuntimeError, match="temporarily unavailable"):
        supervise(run, [[fail]])
    assert orphans[0].wait(120) == -signal.SIGKILL


def test_checkpoints_of_the_script_count_as_progress(run):
    def save(_variables, _emit):
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "last.ckpt").write_text(str(len(run.attempts())))

    saved = [save, *KILLED]
    assert supervise(run, [KILLED, KILLED, saved, KILLED, saved, KILLED, DONE]) == 0
    paths = [event["path"] for event in events_of(run, "checkpoint")]
    assert paths == [str(run.checkpoints / "last.ckpt")] * 2
    started = events_of(run, "started")
    assert [event.get("starts_over", False) for event in started] == [False, True, True, *[False] * 4]


@pytest.mark.parametrize("shrinks", [True, False])
@pytest.mark.parametrize("end", [StepEnded(1), TaskExit(0, 1)])
def test_run_continues_on_the_remaining_nodes(run, shrinks, end):
    write_failure(run, rank=0, message="Connection closed by peer")
    nodes = FakeNodes({"n2": "slurmd is not responding"}, shrinks=shrinks)
    ends = [end] if isinstance(end, StepEnded) else [end, StepEnded(1)]
    assert supervise(run, [ends, DONE], FakeJob(nodes=nodes), min_nodes=1) == 0
    assert nodes.kept == [["n1"]]
    assert kinds(run) == ["started", "failure", "shrink", "started", "finished"]
    first, second = events_of(run, "started")
    assert (first["world_size"], second["world_size"], second["hosts"]) == (2, 1, ["n1"])
    shrink = events_of(run, "shrink")[0]
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (2, 1, ["n2"])
    assert shrink["cause"] == "n2: slurmd is not responding"


def test_too_few_nodes_release_the_allocation(run):
    job = job_with_successor()
    job.nodes = FakeNodes({"n2": "Slurm says DOWN"})
    assert supervise(run, [KILLED], job) == 75
    assert kinds(run) == ["started", "failure", "requeue"]
    failure = events_of(run, "failure")[0]
    assert (failure["rank"], failure["host"], failure["cause"]) == (1, "n2", "node lost: n2: Slurm says DOWN")


def write_failure(run, attempt=0, rank=1, **fields):
    """Write the failure file of a rank that raised an exception."""
    run.failures.mkdir(exist_ok=True)
    record = {"rank": rank, "host": f"n{rank + 1}", "kind": "exception", "error": "KeyError", "time": 0.0}
    record |= {"message": "'x'", "classes": ["KeyError", "Exception"], "log": "/log", "order": rank, **fields}
    run.failure(attempt, rank).write_text(json.dumps(record))


def raise_on_rank_1(run, **fields):
    return [lambda *_: write_failure(run, **fields), TaskExit(1, 1), StepEnded(1)]


def test_final_exception_ends_the_run(run):
    run.log_event("checkpoint", 0, step=1, path="x")
    write_failure(run, final=True)
    assert supervise(run, [[TaskExit(1, 1), StepEnded(1)]]) == 4
    assert kinds(run) == ["checkpoint", "started", "failure", "finished"]
    assert finished(run)["cause"] == "rank 1 on n2: KeyError: 'x'"


@pytest.mark.parametrize("message", ["Connection closed by peer", "in the function's own words"])
def test_exception_of_a_rank_with_stopped_peers_does_not_end_the_run(run, message):
    write_failure(run, message=message, final=True)
    assert supervise(run, [[TaskExit(0, 75), TaskExit(1, 1), StepEnded(1)], DONE]) == 0
    assert finished(run)["state"] == "COMPLETED"


def test_wrong_results_exclude_the_node_and_limit_the_checkpoint(run):
    suspects = [Suspect(1, "other name of n2", "GPU-7")]
    error = SilentCorruption("After step 50, x differed.", suspects, verified_step=40)
    write_failure(run, 0, 0, **failure_record(error, {}))
    limits = []

    def start(variables, _emit):
        limits.append(variables.get(VERIFIED_STEP_VARIABLE))

    def resume(_variables, _emit):
        run.log_event("resumed", 2, step=30)

    job = FakeJob(nodes=FakeNodes())
    killed = [TaskExit(0, None, signal.SIGKILL), StepEnded(137)]
    found = [TaskExit(0, 1), TaskExit(1, 1), StepEnded(1)]
    attempts = [[start, *found], [start, *killed], [start, resume, *killed], [start, *DONE]]
    assert supervise(run, attempts, job, min_nodes=1) == 0
    # The limit applies until an attempt has resumed.
    assert limits == [None, "40", "40", None]
    failure, *_ = events_of(run, "failure")
    assert (failure["class"], failure["rank"], failure["host"]) == ("corruption", 1, "n2")
    assert (failure["device"], failure["verified_step"]) == ("GPU-7", 40)
    assert failure["cause"] == "After step 50, x differed."
    (excluded,) = events_of(run, "excluded")
    assert excluded["hosts"] == ["n2"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [("command", "sent by a user"), ("batch", "job.sbatch: line 3: 7 Killed  python train.py")],
)
def test_command_whose_shell_reports_a_kill_was_killed(run, program, reason):
    (run.path / "adopted.sbatch").write_text("#!/bin/sh\n")

    def start(_variables, _emit):
        run.rank_log(0, 0).write_text("job.sbatch: line 3: 7 Killed  python train.py\n")

    attempts = [[start, TaskExit(0, 137), StepEnded(137)]] * 2 + [DONE]
    assert supervise(run, attempts, program=program) == 0
    assert {failure["class"] for failure in events_of(run, "failure")} == {"killed"}
    assert f"rank 0 on n1: SIGKILL: {reason}" in events_of(run, "failure")[0]["cause"]


SIGNALLED = RankSignalled(1, "SIGTERM")


@pytest.mark.parametrize(
    "end",
    [
        TaskExit(1, None, signal.SIGABRT),
        TaskExit(1, None, signal.SIGKILL),
        TaskExit(1, 1),
        HangDetected("hung", 1, "n2"),
    ],
    ids=["abort", "kill", "exit code", "hang"],
)
@pytest.mark.parametrize("faults", [{}, {"n2": [74]}], ids=["", "Xid"])
def test_end_of_a_rank_after_a_stop_request_is_part_of_the_stop(run, monkeypatch, end, faults):
    monkeypatch.setattr(diagnosis, "gpu_faults", lambda *_: faults)
    job = FakeJob(nodes=FakeNodes(fits=True))
    assert supervise(run, [*([SIGNALLED, end, StepEnded(1)] for _ in range(4)), DONE], job) == 0
    assert job.num_requeues == 4
    assert {*kinds(run)} == {"started", "requeue", "finished"}


def test_exception_after_a_stop_request_is_a_failure_but_releases_the_nodes(run):
    run.log_event("checkpoint", 0, step=1, path="x")
    job = FakeJob()
    assert supervise(run, [[SIGNALLED, *raise_on_rank_1(run)], DONE], job) == 0
    assert kinds(run) == ["checkpoint", "started", "failure", "requeue", "started", "finished"]


def test_killed_data_worker_of_a_rank_is_a_lack_of_memory(run):
    """The rank raises an exception, and Slurm reports the kill."""
    nodes = FakeNodes()
    nodes.larger_memory = lambda hosts, excluded_hosts: "mem=96"
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    write_failure(run, **failure_record(error, {}))
    attempt = [TaskExit(1, 1, out_of_memory=True), StepEnded(1)]
    assert supervise(run, [attempt], FakeJob(refuses=True, nodes=nodes), resume_mode="requeue") == 4
    (failure,) = events_of(run, "failure")
    assert failure["class"] == "oom"


def test_failed_requeue_and_failed_successor_are_both_reported(run):
    job = FakeJob(refuses=True, successors=FakeSuccessors())
    assert supervise(run, [STOPPED], job) == 4
    assert job.successors.continued == [0]
    assert (
        "Requeue is disabled; the submission of a successor job failed: sbatch says: Access denied"
        in finished(run)["cause"]
    )


@pytest.mark.parametrize(
    ("job", "resume_mode", "requeues"),
    [
        (FakeJob(refuses=True), "auto", 1),
        (FakeJob(site_requeues=False), "auto", 0),
        (FakeJob(), "successor", 0),
        (FakeJob(disposition=JobDisposition.EVICTED), "auto", 0),
    ],
)
def test_successor_continues_the_run(run, job, resume_mode, requeues):
    job.successors = FakeSuccessors("8")
    assert supervise(run, [STOPPED], job, resume_mode=resume_mode) == 75
    assert (job.successors.continued, job.num_requeues) == ([0], requeues)
    assert kinds(run) == ["started", "requeue"]


def successor_job(run, record=True):
    """Return job 8, which continues job 7."""
    run.log_event("handover", 0, job_id="7")
    if record:
        run.log_event("submitted", 1, job_id="8", backend="slurm", after="7")
    return FakeJob(job_id="8", successors=FakeSuccessors(predecessor="7"))


@pytest.mark.parametrize("record", [True, False])
def test_successor_trains_with_or_without_a_record_by_its_predecessor(run, record):
    assert supervise(run, [DONE], successor_job(run, record)) == 0
    assert kinds(run) == ["handover", "submitted", "started", "finished"]
    submitted = list(read_json_lines(run.events))[2]
    assert (submitted["job_id"], submitted["after"]) == ("8", "7")
    assert run.successor_claim("7").read_text() == "8"


@pytest.mark.parametrize("record", [True, False])
def test_requeued_predecessor_leaves_the_run_to_its_successor(run, record):
    successor_job(run, record)
    assert supervise(run, [], FakeJob(successors=FakeSuccessors("8"))) == 0
    assert [event["job_id"] for event in events_of(run, "submitted")] == ["7", "8"]


@pytest.mark.parametrize("recorded", [True, False])
def test_cancelled_job_that_slurm_starts_again_trains_no_more(run, recorded):
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    run.cancel_request.touch()
    if recorded:
        run.log_event("finished", 0, state="CANCELLED", exit_code=0)
    assert supervise(run, []) == 0
    assert finished(run)["state"] == "CANCELLED"


def test_user_error_in_the_first_step_ends_the_run(run):
    run.metrics.write_text('{"step": 1, "loss": 2.5}\n')
    assert supervise(run, [raise_on_rank_1(run)]) == 4
    assert kinds(run) == ["started", "failure", "finished"]
    assert failure_of(run)["class"] == "user-error"
    assert finished(run)["cause"] == "rank 1 on n2: KeyError: 'x'"


@pytest.mark.parametrize("condition", ["a step", "a checkpoint", "the network"])
def test_other_exceptions_are_retried(run, condition):
    if condition == "a step":
        run.metrics.write_text('{"step": 2, "loss": 2.5, "attempt": 1}\n')
    if condition == "a checkpoint":
        run.log_event("checkpoint", 0, step=1, path="x")
    classes = ["OSError"] if condition == "the network" else ["KeyError"]
    assert supervise(run, [raise_on_rank_1(run, classes=classes), DONE]) == 0
    assert failure_of(run)["class"] == "python"


def test_excluded_node_stays_excluded_after_a_requeue(run):
    run.log_event("excluded", 0, hosts=["n2"], reason="n2: gpu")
    assert supervise(run, [DONE], min_nodes=1) == 0
    assert events_of(run, "started")[0]["hosts"] == ["n1"]


def test_spare_node_replaces_a_lost_one(run):
    nodes = FakeNodes({"n2": "slurmd is not responding"})
    assert supervise(run, [KILLED, DONE], FakeJob(nodes=nodes), spares=["n3", "n4"]) == 0
    assert nodes.kept == [["n1", "n3", "n4"]]
    replaced = events_of(run, "replace")[0]
    assert (replaced["hosts"], replaced["lost"]) == (["n1", "n3"], ["n2"])
    assert failure_of(run)["class"] == "node-lost"


def test_xid_of_the_device_classifies_the_failure_as_gpu(run):
    def report(_variables, _emit):
        path = run.telemetry(1)
        path.parent.mkdir()
        path.write_text(json.dumps({"time": 4e9, "host": "n2.site", "gpu_xids": [[], [79]]}) + "\n")

    assert supervise(run, [[report, *KILLED], node_check(run, 1, [[], []]), DONE]) == 0
    assert failure_of(run)["class"] == "gpu"


@pytest.mark.parametrize(
    ("kind", "path", "folders"),
    [
        ("checkpoint", "/fast/hpctrain-x-1/step-00000002", ["/fast", "-"]),
        ("memory_copy", "/dev/shm/hpctrain-x-1-copies", ["-", "/dev/shm/hpctrain-x-1-copies"]),
    ],
)
def test_nodes_are_cleaned_up_before_they_are_released(run, kind, path, folders):
    def save(_variables, _emit):
        run.log_event(kind, 0, step=2, tier="local", path=path)

    commands, launcher = [], FakeLauncher([[save, *KILLED], DONE])
    start = launcher.start
    launcher.start = lambda command, *rest: commands.append(command) or start(command, *rest)
    assert Supervisor(run, spec_of(run, max_failures=1), launcher, FakeJob()).run() == 4
    assert commands[1][-5:] == ["-m", "hpctrain.runtime.drain_local_tier", *folders, "60"]
    assert kinds(run)[-1] == "finished"


def node_check(run, attempt, problems):
    """Make the node check report these problems of each rank's node."""

    def write(_variables, _emit):
        for rank, rank_problems in enumerate(problems):
            path = run.node_check_result(attempt, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"rank": rank, "trouble": rank_problems}))

    return [write, StepEnded(0)]


@pytest.mark.parametrize(
    ("results", "problem"),
    [([[], ["GPU 0 is in use"]], "GPU 0 is in use"), ([[]], "the check did not finish")],
    ids=["reported", "unfinished"],
)
def test_node_that_fails_the_check_is_excluded_before_the_start(run, results, problem):
    attempts = [node_check(run, 0, results), node_check(run, 1, [[]]), DONE]
    assert supervise(run, attempts, FakeJob(nodes=FakeNodes()), node_check="always", min_nodes=1) == 0
    assert kinds(run) == ["failure", "excluded", "shrink", "started", "finished"]
    assert failure_of(run)["cause"] == f"node check: n2: {problem}"
    assert events_of(run, "started")[0]["hosts"] == ["n1"]


@pytest.mark.parametrize("problems", [[["no sum"], ["no sum"]], []])
def test_check_that_fails_on_all_nodes_excludes_none(run, problems):
    assert supervise(run, [node_check(run, 0, problems), DONE], node_check="always") == 0
    assert kinds(run) == ["started", "finished"]


def test_stop_during_the_check_requeues(run):
    def stopped(_variables, _emit):
        run.requeue_request.write_text("0\n")
        path = run.node_check_result(0, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rank": 1, "trouble": [], "stopped": True}))

    attempts = [[stopped, StepEnded(143)], node_check(run, 1, [[], []]), DONE]
    assert supervise(run, attempts, node_check="always") == 0
    assert kinds(run) == ["requeue", "started", "finished"]
    assert [event.get("class") for event in events_of(run, "requeue")] == ["requested"]


def test_nodes_are_checked_after_a_communication_failure(run):
    lost = raise_on_rank_1(run, message="Connection closed by peer")
    assert supervise(run, [lost, node_check(run, 1, [[], []]), DONE]) == 0
    assert failure_of(run)["class"] == "communication"
    assert run.node_check_results(1)


@pytest.mark.parametrize(("limit_s", "code"), [(60.0, 0), (0.0, 4)])
def test_unreachable_controller_is_retried_until_a_limit(run, monkeypatch, limit_s, code):
    monkeypatch.setattr(requeuer, "_PAUSE_S", 0.01)
    monkeypatch.setattr(requeuer, "_UNREACHABLE_TIMEOUT_S", limit_s)

    class UnreachableJob(FakeJob):
        def requeue(self):
            self.num_requeues += 1
            if self.num_requeues < 4:
                raise SchedulerError("scontrol says: Unable to contact slurm controller (connect failure)")
            return False

    assert supervise(run, [STOPPED, *([] if code else [DONE])], UnreachableJob()) == code
    assert ("Unable to contact slurm controller" in str(finished(run)["cause"])) is bool(code)


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        (["1.5", "NaN"], "The last loss is NaN (step 2)."),
        (["1.5", '"NaN"'], "The last loss is NaN (step 2)."),
        (["1.5", "-Infinity"], "The last loss is -inf (step 2)."),
        (["NaN", "1.5"], ""),
        (["1.5", "[1]", '"high"', "null"], ""),
        ([], ""),
    ],
)
def test_non_finite_last_loss_is_noted(run, losses, note):
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, 1)]
    run.metrics.write_text("".join(lines))
    assert supervise(run, [DONE]) == 0
    assert finished(run).get("note", "") == note


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"what": 3, "last_step": "x"}'])
def test_damaged_unfinished_markers_do_not_end_the_supervisor(run, content):
    path = run.unfinished_marker(0, 0, "00000000")
    path.parent.mkdir()
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    for name in ("attempt-000-rank-x-0.json", "attempt-000-rank-0x-0.json", "attempt-000-rank-99999-0.json"):
        (path.parent / name).write_text("{}")
    assert supervise(run, [DONE]) == 4
    assert "the script exited with code 0 before" in finished(run)["cause"]
    assert not path.exists()


def end_unfinished(run, events, ranks=(0,)):
    """Make ranks end with exit code 0 during a training."""

    def mark(variables, _emit):
        attempt = int(variables["HPCTRAIN_ATTEMPT"])
        for rank in ranks:
            path = run.unfinished_marker(attempt, rank, "0")
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"what": "Trainer.fit()", "last_step": 10}')

    return [mark, *events]


def test_unfinished_training_is_the_cause_of_lost_peers(run):
    def lose_peer(_variables, _emit):
        write_failure(run, rank=0, error="RuntimeError", message="Connection closed by peer")

    events = [lose_peer, TaskExit(1, 0), TaskExit(0, 1), StepEnded(1)]
    assert supervise(run, [end_unfinished(run, events, (0, 1))]) == 4
    assert finished(run)["cause"].startswith("rank 1 on n2: the script exited with code 0")


def train_steps(run, attempt=0, step=31, checkpoint=None):
    """Make the ranks of an attempt train steps and, if given, write a checkpoint."""

    def train(_variables, _emit):
        with open(run.metrics, "a") as metrics:
            metrics.write(json.dumps({"step": step, "attempt": attempt, "time": 1.0}) + "\n")
        if checkpoint is not None:
            run.log_event("checkpoint", attempt, path="x", **checkpoint)

    return train


@pytest.mark.parametrize("checkpoint", [None, {"step": 30}])
def test_restart_that_trains_no_step_after_a_crash_is_not_complete(run, checkpoint):
    assert supervise(run, [[train_steps(run, checkpoint=checkpoint), *KILLED], DONE]) == 4
    assert finished(run)["state"] == "FAILED"
    assert finished(run)["cause"].startswith("attempt 0 failed after step 31 (rank 1 on n2: SIGKILL")
    assert "attempt 1 trained no step and exited with code 0, and no checkpoint" in finished(run)["cause"]
    assert (
        "If the script had finished and saved its result elsewhere, nothing is lost."
        in finished(run)["cause"]
    )
    assert [event["class"] for event in events_of(run, "failure")] == ["killed", "unfinished"]


@pytest.mark.parametrize(
    "attempts",
    [
        # A crash after the last step, whose checkpoint shows that training is complete.
        lambda run: [[train_steps(run, checkpoint={"step": 31}), *KILLED], DONE],
        lambda run: [[train_steps(run, checkpoint={"step": None}), *KILLED], DONE],
        lambda run: [[train_steps(run), *KILLED], [train_steps(run, 1, 5), *DONE]],
        # The `Trainer` ended training right after it had loaded a checkpoint.
        lambda run: [
            [train_steps(run, checkpoint={"step": 30}), *KILLED],
            [lambda *_: run.log_event("resumed", 1, step=30, checkpoint="x"), *DONE],
        ],
        # A crash before the first step, such as of a script that only evaluates.
        lambda run: [KILLED, DONE],
        # A script may exit with code 0 after its last step and a stop signal.
        lambda run: [[train_steps(run), *STOPPED], DONE],
    ],
)
def test_restart_that_trains_no_step_may_be_complete(run, attempts):
    assert supervise(run, attempts(run)) == 0
    assert finished(run)["state"] == "COMPLETED"


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_run_with_special_files_as_records_is_refused(tmp_path, name, capsys):
    RunDir(tmp_path).spec.write_text(spec_of(RunDir(tmp_path)).text())
    (tmp_path / name).mkdir()
    assert main([str(tmp_path)], {}) == 2
    assert f"Error: {tmp_path / name} is not a regular file" in capsys.readouterr().err
