"""The supervisor over several attempts, with a launcher and a scheduler that only pretend."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest
from torch.distributed import TCPStore

from hpctrain.errors import SchedulerError
from hpctrain.rundir import STOP_GRACE_VARIABLE, RunDir
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.launcher import TorchrunConfig
from hpctrain.supervisor import acquire_run, requeuer
from hpctrain.supervisor.launch.job_step import StepEnded, TaskExit
from hpctrain.supervisor.main import main
from hpctrain.supervisor.policy.job_intent import JobDisposition
from hpctrain.supervisor.supervise import Supervisor

KILLED = [TaskExit(1, None, signal.SIGKILL), StepEnded(137)]
STOPPED = [TaskExit(0, 75), TaskExit(1, 75), StepEnded(75)]
DONE = [StepEnded(0)]


class PretendStep:
    def signal(self, number):
        raise AssertionError("nothing to signal")

    kill = close = lambda self: None


class PretendLauncher:
    """Each start brings the next of `attempts` about: events, or what is done before them."""

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
        return PretendStep()


class PretendJob:
    """A job that is requeued at once, in this process, unless `refuses`."""

    job_id = "7"
    ends_job_at = None
    on_signal: ClassVar = {}
    cancel_signals = frozenset()
    nodes = successors = None

    def __init__(
        self, refuses=False, disposition=JobDisposition.STAYS, left=None, site_requeues=True, **parts
    ):
        self.refuses, self.left, self.site_requeues = refuses, left, site_requeues
        self.later_disposition = disposition
        self.num_requeues = 0
        self.__dict__.update(parts)

    def disposition(self):
        is_over = self.num_requeues or self.later_disposition is JobDisposition.EVICTED
        return self.later_disposition if is_over else JobDisposition.STAYS

    def can_requeue(self):
        return self.site_requeues

    def seconds_left(self):
        return self.left

    def requeue(self):
        self.num_requeues += 1
        if self.refuses:
            raise SchedulerError("scontrol says: Requeue is disabled")
        return False


class PretendNodes:
    def __init__(self, lost=None, fits=False, shrinks=True):
        self.lost_ones, self.fits, self.shrinks, self.kept = lost or {}, fits, shrinks, []

    def lost(self, hosts):
        return {host: why for host, why in self.lost_ones.items() if host in hosts}

    def can_reallocate(self, left_out):
        return self.fits

    def shrink_to(self, hosts):
        self.kept.append(hosts)
        if not self.shrinks:
            raise SchedulerError("scontrol says: Job shrink disabled")

    def kill_steps(self):
        pass


class PretendSuccessors:
    lease = SimpleNamespace(acquire=lambda predecessor, deaths: None)

    def __init__(self, successor=None, predecessor=None):
        self.successor, self.predecessor, self.continued = successor, predecessor, []

    def submit(self, attempt, left_out=()):
        self.continued.append(attempt)
        if self.successor is None:
            raise SchedulerError("sbatch says: Access denied")
        return self.successor

    def find(self):
        return self.successor


def only_successor():
    """A job on a site that does not requeue; job 8 continues it."""
    return PretendJob(site_requeues=False, successors=PretendSuccessors("8"))


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    return run


def spec_of(run, **fields):
    return JobSpec(
        script="/x.py",
        name="x",
        run_id="x",
        run_dir=str(run.path),
        backend="slurm",
        nodes=2,
        python="python",
        workdir="/",
        **fields,
    )


def supervise(run, attempts, job=None, spares=(), **fields):
    spec = spec_of(run, **fields)
    launcher = PretendLauncher(attempts)
    launcher.spares = list(spares)
    code = Supervisor(run, spec, launcher, job or PretendJob()).run()
    assert launcher.attempts == []
    return code


def kinds(run):
    return [event["kind"] for event in run.read_events()][1:]


def finished(run):
    return next(event for event in run.read_events() if event["kind"] == "finished")


@pytest.mark.parametrize(("kind", "goes_on"), [("preempted", "requeue"), ("killed", "restart")])
def test_a_supervisor_killed_before_it_gave_the_nodes_back_gives_them_back(run, kind, goes_on):
    run.log_event("started", run.new_attempt(), nodes=2, world_size=2, hosts=["n1", "n2"])
    run.log_event("requeue", 0, seconds=9.0, by="successor", **{"class": kind})
    launcher = PretendLauncher([DONE] if goes_on == "restart" else [])
    Supervisor(run, spec_of(run), launcher, only_successor()).run(deaths=1)
    assert kinds(run)[:4] == ["started", "requeue", "failure", goes_on]
    assert launcher.attempts == []


def test_crash_restart_done(run):
    assert supervise(run, [KILLED, DONE]) == 0
    assert kinds(run) == ["started", "failure", "restart", "started", "finished"]
    assert finished(run)["state"] == "COMPLETED"
    assert run.failure(0, 1).exists()


def test_three_crashes_end_the_run_with_the_cause(run):
    assert supervise(run, [KILLED, KILLED, KILLED]) == 4
    assert finished(run)["state"] == "FAILED"
    assert "rank 1 on n2: SIGKILL" in finished(run)["cause"]


def test_a_scripts_own_checkpoints_count_as_progress(run):
    def save(_variables, _emit):
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "last.ckpt").write_text(str(len(run.attempts())))

    saved = [save, *KILLED]
    assert supervise(run, [KILLED, KILLED, saved, KILLED, saved, KILLED, DONE]) == 0
    paths = [event["path"] for event in run.read_events() if event["kind"] == "checkpoint"]
    assert paths == [str(run.checkpoints / "last.ckpt")] * 2


def test_a_script_that_crashes_after_writing_the_same_files_again_is_given_up(run):
    def save(_variables, _emit):
        run.checkpoints.mkdir(exist_ok=True)
        (run.checkpoints / "last.ckpt").write_text(str(len(run.attempts())))

    assert supervise(run, [[save, *KILLED]] * 30) == 4


def test_ranks_that_never_met_are_remarked(run):
    assert supervise(run, [DONE]) == 0
    assert "none of the 2 ranks created a process group" in finished(run)["note"]


def test_ranks_that_met_at_an_agents_store_are_not(run):
    assert supervise(run, [DONE], torchrun=TorchrunConfig()) == 0
    assert "note" not in finished(run)


def test_ranks_that_met_are_not_remarked(run):
    def meet(variables, emit):
        where = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])

        def rank():
            TCPStore(*where, is_master=False, wait_for_workers=False).set("rank", "0")
            emit(StepEnded(0))

        # The store answers only when the ranks have been started.
        threading.Thread(target=rank).start()

    assert supervise(run, [[meet]]) == 0
    assert "note" not in finished(run)


@pytest.mark.parametrize("shrinks", [True, False])
@pytest.mark.parametrize("end", [StepEnded(1), TaskExit(0, 1)])
def test_the_run_goes_on_with_the_nodes_that_are_left(run, shrinks, end):
    write_exception(run, 0, "Connection closed by peer")
    nodes = PretendNodes({"n2": "the slurmd does not respond"}, shrinks=shrinks)
    ends = [end] if isinstance(end, StepEnded) else [end, StepEnded(1)]
    assert supervise(run, [ends, DONE], PretendJob(nodes=nodes), min_nodes=1) == 0
    assert nodes.kept == [["n1"]]
    assert kinds(run) == ["started", "failure", "shrink", "started", "finished"]
    first, second = (event for event in run.read_events() if event["kind"] == "started")
    assert (first["world_size"], second["world_size"], second["hosts"]) == (2, 1, ["n1"])
    shrink = next(event for event in run.read_events() if event["kind"] == "shrink")
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (2, 1, ["n2"])
    assert shrink["cause"] == "n2: the slurmd does not respond"


def test_too_few_nodes_give_the_allocation_back(run):
    job = only_successor()
    job.nodes = PretendNodes({"n2": "Slurm says DOWN"})
    assert supervise(run, [KILLED], job) == 75
    assert kinds(run) == ["started", "failure", "requeue"]
    failure = next(event for event in run.read_events() if event["kind"] == "failure")
    assert (failure["rank"], failure["host"], failure["cause"]) == (1, "n2", "node lost: n2: Slurm says DOWN")


def write_exception(run, rank, message="no such thing", final=True):
    """What a rank leaves whose function raised."""
    run.failures.mkdir(exist_ok=True)
    record = {"rank": rank, "host": f"n{rank + 1}", "kind": "exception", "error": "ValueError"}
    record |= {"message": message, "log": "/log", "order": rank, "time": 0.0, "final": final}
    run.failure(0, rank).write_text(json.dumps(record))


def test_an_exception_that_would_come_again_ends_the_run(run):
    write_exception(run, 1)
    assert supervise(run, [[TaskExit(1, 1), StepEnded(1)]]) == 4
    assert kinds(run) == ["started", "failure", "finished"]
    assert finished(run)["cause"] == "rank 1 on n2: ValueError: no such thing"


def test_an_exception_that_follows_from_a_kill_does_not_end_the_run(run):
    write_exception(run, 0)
    assert supervise(run, [KILLED, DONE]) == 0
    assert kinds(run) == ["started", "failure", "restart", "started", "finished"]


@pytest.mark.parametrize("message", ["Connection closed by peer", "in the function's own words"])
def test_an_exception_of_a_rank_whose_peer_was_told_to_leave_does_not_end_the_run(run, message):
    write_exception(run, 1, message)
    assert supervise(run, [[TaskExit(0, 75), TaskExit(1, 1), StepEnded(1)], DONE]) == 0
    assert finished(run)["state"] == "COMPLETED"


def test_stop_requeue_done(run):
    assert supervise(run, [STOPPED, DONE]) == 0
    assert kinds(run) == ["started", "requeue", "started", "finished"]


def test_a_refused_requeue_fails_in_the_schedulers_words(run):
    assert supervise(run, [STOPPED], PretendJob(refuses=True), resume_mode="requeue") == 4
    assert (
        "the checkpoint is saved, but the requeue failed: scontrol says: Requeue is disabled"
        in finished(run)["cause"]
    )


def test_where_neither_requeue_nor_successor_is_to_be_had_both_are_told(run):
    job = PretendJob(refuses=True, successors=PretendSuccessors())
    assert supervise(run, [STOPPED], job) == 4
    assert job.successors.continued == [0]
    assert "Requeue is disabled; the successor failed: sbatch says: Access denied" in finished(run)["cause"]


@pytest.mark.parametrize(
    ("job", "resume_mode", "requeues"),
    [
        (PretendJob(refuses=True), "auto", 1),
        (PretendJob(site_requeues=False), "auto", 0),
        (PretendJob(), "successor", 0),
        (PretendJob(disposition=JobDisposition.EVICTED), "auto", 0),
    ],
)
def test_a_successor_is_handed_the_run(run, job, resume_mode, requeues):
    job.successors = PretendSuccessors("8")
    assert supervise(run, [STOPPED], job, resume_mode=resume_mode) == 75
    assert (job.successors.continued, job.num_requeues) == ([0], requeues)
    assert kinds(run) == ["started", "requeue"]


def test_a_run_that_is_evicted_ends_where_no_successor_is_wanted(run):
    job = PretendJob(disposition=JobDisposition.EVICTED, successors=PretendSuccessors("8"))
    assert supervise(run, [STOPPED], job, resume_mode="requeue") == 75
    assert kinds(run) == ["started"]


def succeeding(run, record=True, job_id="8"):
    """Job 8, which continues job 7."""
    run.log_event("handover", 0, job_id="7")
    if record:
        run.log_event("submitted", 1, job_id="8", backend="slurm", after="7")
    return PretendJob(job_id=job_id, successors=PretendSuccessors(predecessor="7"))


@pytest.mark.parametrize("record", [True, False])
def test_a_successor_trains_whether_or_not_its_predecessor_could_write_it_down(run, record):
    assert supervise(run, [DONE], succeeding(run, record)) == 0
    assert kinds(run) == ["handover", "submitted", "started", "finished"]
    submitted = list(run.read_events())[2]
    assert (submitted["job_id"], submitted["after"]) == ("8", "7")
    assert run.successor_claim("7").read_text() == "8"


def test_of_two_successors_one_trains(run):
    job = succeeding(run)
    job.successors.successor, job.site_requeues = "9", False
    assert supervise(run, [STOPPED], job) == 75
    assert supervise(run, [], succeeding(run, record=False, job_id="10")) == 0
    # That it is started a second time, after a requeue, makes it no other job.
    assert supervise(run, [DONE], job) == 0


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED"])
def test_a_successor_of_a_run_that_has_ended_does_nothing(run, state):
    job = succeeding(run, record=False)
    run.log_event("finished", 0, state=state, exit_code=4)
    assert supervise(run, [], job) == 4


def test_a_successor_of_a_run_that_was_cancelled_meanwhile_ends_it(run):
    job = succeeding(run)
    run.cancel_request.touch()
    assert supervise(run, [], job) == 0
    assert finished(run)["state"] == "CANCELLED"


def test_a_successor_ends_where_the_run_was_submitted_anew(run):
    job = succeeding(run, record=False)
    run.log_event("submitted", 1, job_id="20", backend="slurm")
    assert supervise(run, [], job) == 0


@pytest.mark.parametrize("record", [True, False])
def test_a_job_that_slurm_requeues_leaves_the_run_to_its_successor(run, record):
    succeeding(run, record)
    assert supervise(run, [], PretendJob(successors=PretendSuccessors("8"))) == 0
    assert [event["job_id"] for event in run.read_events() if event["kind"] == "submitted"] == ["7", "8"]


def test_a_job_that_slurm_requeues_goes_on_where_no_successor_was_submitted(run):
    run.log_event("handover", 0, job_id="7")
    assert supervise(run, [DONE], PretendJob(successors=PretendSuccessors())) == 0


def test_a_requeue_that_slurm_did_first_is_no_failure(run):
    assert supervise(run, [STOPPED], PretendJob(refuses=True, disposition=JobDisposition.REQUEUED)) == 75
    assert "finished" not in kinds(run)


def test_a_crash_shortly_before_the_time_limit_requeues(run):
    job = PretendJob(left=60.0)
    assert supervise(run, [KILLED, DONE], job) == 0
    assert job.num_requeues == 1


def test_the_log_of_the_supervisor_has_no_python_values(run, caplog):
    caplog.set_level(logging.INFO)
    refused = [StepEnded(1, "srun: error: Unable to create step for job 7: Node down")]
    assert supervise(run, [KILLED, refused, DONE]) == 0
    text = "\n".join(caplog.messages)
    assert "attempt 0: starting 2 ranks on n[1-2]" in text
    assert "attempt 0 ended (killed): restart the ranks on n[1-2]" in text
    assert "attempt 1 ended (not-started): requeue the job" in text
    assert "attempt 2 ended (done): complete the run" in text
    assert not re.search(r"\w\(\w+=|<\w+|\[['\"]|\{['\"]|\('", text)


def test_a_stop_after_a_request_to_cancel_is_the_end(run):
    run.cancel_request.touch()
    assert supervise(run, [STOPPED]) == 0
    assert finished(run)["state"] == "CANCELLED"


def test_a_step_that_does_not_start_is_requeued_three_times_at_most(run):
    refused = [StepEnded(1, "srun: error: Unable to create step for job 7: Node down")]
    assert supervise(run, [refused, refused, refused]) == 4
    assert "Node down" in finished(run)["cause"]
    assert kinds(run).count("requeue") == 2


def test_a_completed_run_is_not_trained_again_but_a_failed_one_is(run):
    run.log_event("finished", 0, state="COMPLETED", exit_code=0)
    assert supervise(run, []) == 0
    assert kinds(run) == ["finished"]
    run.log_event("submitted", 1, job_id="7", backend="slurm")
    run.log_event("finished", 1, state="FAILED", exit_code=4)
    assert supervise(run, [DONE]) == 0
    assert kinds(run)[-4:] == ["finished", "submitted", "started", "finished"]


def test_a_job_that_nobody_recorded_is_recorded(run, monkeypatch):
    monkeypatch.setattr(acquire_run, "_RECORD_LIMIT_S", 0.1)
    assert supervise(run, [DONE], PretendJob(job_id="8")) == 0
    assert kinds(run) == ["submitted", "started", "finished"]


def failure_of(run):
    return next(event for event in run.read_events() if event["kind"] == "failure")


def raised(run, attempt=0, **fields):
    """Have rank 1 raise, as a script does."""

    def write(_variables, _emit):
        run.failures.mkdir(exist_ok=True)
        record = {"rank": 1, "host": "n2", "kind": "exception", "error": "KeyError", "message": "'x'"}
        record |= {"classes": ["KeyError", "Exception"], "log": "/log", "order": 1, "time": 0.0, **fields}
        run.failure(attempt, 1).write_text(json.dumps(record))

    return [write, TaskExit(1, 1), StepEnded(1)]


def test_a_users_error_in_the_first_step_ends_the_run_at_once(run):
    run.metrics.write_text('{"step": 1, "loss": 2.5}\n')
    assert supervise(run, [raised(run)]) == 4
    assert kinds(run) == ["started", "failure", "finished"]
    assert failure_of(run)["class"] == "user-error"
    assert finished(run)["cause"] == "rank 1 on n2: KeyError: 'x'"


@pytest.mark.parametrize("known", ["a step", "a checkpoint", "the network"])
def test_an_exception_may_pass_that_is_no_users_error(run, known):
    if known == "a step":
        run.metrics.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.5}\n')
    if known == "a checkpoint":
        run.log_event("checkpoint", 0, step=1, path="x")
    classes = ["OSError"] if known == "the network" else ["KeyError"]
    assert supervise(run, [raised(run, classes=classes), DONE]) == 0
    assert failure_of(run)["class"] == "python"


def test_the_same_exception_twice_in_a_row_is_not_tried_a_third_time(run):
    run.log_event("checkpoint", 0, step=1, path="x")
    assert supervise(run, [raised(run), raised(run, 1)]) == 4
    assert finished(run)["cause"] == "rank 1 on n2: KeyError: 'x'"
    assert finished(run)["note"].startswith("the same python failure occurred 2 times in a row")


def test_the_user_may_have_an_error_tried_again(run):
    assert supervise(run, [raised(run), DONE], restart_policy={"user-error": {"retries": 1}}) == 0


def test_a_node_at_fault_is_left_out_of_the_next_job(run):
    job = PretendJob(nodes=PretendNodes(fits=True))
    assert supervise(run, [KILLED, KILLED, DONE], job) == 0
    assert kinds(run) == [
        *("started", "failure", "restart", "started", "failure", "excluded", "requeue", "started", "finished")
    ]
    excluded = next(event for event in run.read_events() if event["kind"] == "excluded")
    assert (excluded["hosts"], excluded["reason"]) == (["n2"], "n2: killed, 2 times")


def test_a_node_at_fault_is_left_out_of_the_step(run):
    assert supervise(run, [KILLED, KILLED, DONE], PretendJob(nodes=PretendNodes()), min_nodes=1) == 0
    starts = [event["hosts"] for event in run.read_events() if event["kind"] == "started"]
    assert starts == [["n1", "n2"], ["n1", "n2"], ["n1"]]


def test_nodes_that_were_left_out_before_are_so_after_a_requeue_that_granted_them_again(run):
    run.log_event("excluded", 0, hosts=["n2"], reason="n2: gpu")
    assert supervise(run, [DONE], min_nodes=1) == 0
    assert next(event for event in run.read_events() if event["kind"] == "started")["hosts"] == ["n1"]


def test_a_spare_node_takes_the_place_of_a_lost_one(run):
    nodes = PretendNodes({"n2": "the slurmd does not respond"})
    assert supervise(run, [KILLED, DONE], PretendJob(nodes=nodes), spares=["n3", "n4"]) == 0
    assert nodes.kept == [["n1", "n3", "n4"]]
    replaced = next(event for event in run.read_events() if event["kind"] == "replace")
    assert (replaced["hosts"], replaced["lost"]) == (["n1", "n3"], ["n2"])
    assert failure_of(run)["class"] == "node-lost"


def test_an_xid_of_the_device_makes_it_the_gpus_fault(run):
    def report(_variables, _emit):
        path = run.telemetry(1)
        path.parent.mkdir()
        path.write_text(json.dumps({"time": 4e9, "host": "n2.site", "gpu_xids": [None, "79"]}) + "\n")

    assert supervise(run, [[report, *KILLED], checked(run, 1, [[], []]), DONE]) == 0
    assert failure_of(run)["class"] == "gpu"


def test_before_nodes_are_given_back_after_a_crash_their_fast_folders_are_emptied(run):
    def save(_variables, _emit):
        run.log_event("checkpoint", 0, step=2, tier="local", path="/fast/hpctrain-x-1/step-00000002")

    commands, launcher = [], PretendLauncher([[save, *KILLED], DONE])
    start = launcher.start
    launcher.start = lambda command, *rest: commands.append(command) or start(command, *rest)
    assert Supervisor(run, spec_of(run, max_failures=1), launcher, PretendJob()).run() == 4
    assert commands[1][-4:] == ["-m", "hpctrain.runtime.drain_local_tier", "/fast", "60"]
    assert kinds(run)[-1] == "finished"


def checked(run, attempt, trouble):
    """Have the check of the nodes find what is wrong with each rank's."""

    def write(_variables, _emit):
        for rank, words in enumerate(trouble):
            path = run.node_check_result(attempt, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"rank": rank, "trouble": words}))

    return [write, StepEnded(0)]


def test_a_node_that_fails_the_check_is_left_out_before_the_ranks_start(run):
    attempts = [checked(run, 0, [[], ["GPU 0 is in use"]]), checked(run, 1, [[]]), DONE]
    job = PretendJob(nodes=PretendNodes())
    assert supervise(run, attempts, job, node_check="always", min_nodes=1) == 0
    assert kinds(run) == ["failure", "excluded", "shrink", "started", "finished"]
    assert failure_of(run)["cause"] == "node check: n2: GPU 0 is in use"
    assert next(event for event in run.read_events() if event["kind"] == "started")["hosts"] == ["n1"]


def test_a_check_that_does_not_come_to_an_end_on_one_node_tells_of_it(run):
    attempts = [checked(run, 0, [[]]), DONE]
    job = only_successor()
    job.nodes = PretendNodes(fits=True)
    assert supervise(run, attempts[:1], job, node_check="always") == 75
    assert kinds(run) == ["failure", "excluded", "requeue"]
    assert "n2: the check did not finish" in failure_of(run)["cause"]


@pytest.mark.parametrize("trouble", [[["no sum"], ["no sum"]], []])
def test_a_check_that_all_nodes_fail_or_none_can_do_is_no_nodes_fault(run, trouble):
    assert supervise(run, [checked(run, 0, trouble), DONE], node_check="always") == 0
    assert kinds(run) == ["started", "finished"]


def test_a_stop_during_the_check_is_one_of_the_ranks(run):
    def stopped(_variables, _emit):
        run.requeue_request.write_text("0\n")
        path = run.node_check_result(0, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"rank": 1, "trouble": [], "stopped": True}))

    attempts = [[stopped, StepEnded(143)], checked(run, 1, [[], []]), DONE]
    assert supervise(run, attempts, node_check="always") == 0
    assert kinds(run) == ["requeue", "started", "finished"]
    assert [event.get("class") for event in run.read_events() if event["kind"] == "requeue"] == ["requested"]


def test_the_nodes_are_looked_at_after_a_failure_of_the_communication(run):
    lost = raised(run, message="Connection closed by peer")
    assert supervise(run, [lost, checked(run, 1, [[], []]), DONE]) == 0
    assert failure_of(run)["class"] == "nccl"
    assert run.node_check_results(1)


def test_ranks_that_need_longer_to_save_are_told_of_more_time_and_earlier(run):
    run.log_event("checkpoint", 0, step=1, path="x", seconds=400.0)
    seen, job = [], only_successor()
    job.left = 512.0 + 1

    def note(variables, _emit):
        seen.append(variables[STOP_GRACE_VARIABLE])

    class Told(PretendStep):
        def signal(self, number):
            seen.append(number)
            self.emit(TaskExit(0, 75))
            self.emit(StepEnded(75))

    class Launcher(PretendLauncher):
        def start(self, command, variables, emit):
            note(variables, emit)
            step = Told()
            step.emit = emit
            return step

    spec = spec_of(run, stop_before_limit_s=120)
    grace = {STOP_GRACE_VARIABLE: "SIGTERM=30,SIGUSR2=120"}
    supervisor = Supervisor(run, spec, Launcher([]), job, grace)
    supervisor.run()
    assert seen == ["SIGTERM=30,SIGUSR2=512", signal.SIGUSR2]


def test_a_controller_that_is_out_of_reach_is_asked_again(run, monkeypatch):
    monkeypatch.setattr(requeuer, "_PAUSE_S", 0.01)

    class Away(PretendJob):
        def requeue(self):
            self.num_requeues += 1
            if self.num_requeues < 4:
                raise SchedulerError("scontrol says: Unable to contact slurm controller (connect failure)")
            return False

    job = Away()
    assert supervise(run, [STOPPED, DONE], job) == 0
    assert job.num_requeues == 4
    assert kinds(run) == ["started", "requeue", "started", "finished"]


def test_a_controller_that_stays_out_of_reach_is_not_waited_for_for_ever(run, monkeypatch):
    monkeypatch.setattr(requeuer, "_PAUSE_S", 0.01)
    monkeypatch.setattr(requeuer, "_UNREACHABLE_TIMEOUT_S", 0.05)

    class Away(PretendJob):
        def requeue(self):
            raise SchedulerError("scontrol says: Unable to contact slurm controller (connect failure)")

    assert supervise(run, [STOPPED], Away()) == 4
    assert "Unable to contact slurm controller" in finished(run)["cause"]


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
def test_a_last_loss_that_is_not_finite_is_noted(run, losses, note):
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, 1)]
    run.metrics.write_text("".join(lines))
    assert supervise(run, [DONE]) == 0
    never_met, _, rest = finished(run)["note"].partition("each rank trained alone.")
    assert (never_met != "", rest.strip()) == (True, note)


@pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"what": 3, "last_step": "x"}'])
def test_damaged_files_of_unfinished_trainings_do_not_end_the_supervisor(run, content):
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


def test_a_file_of_an_unfinished_training_of_no_rank_is_ignored(run):
    path = run.unfinished_marker(0, 99999, "00000000")
    path.parent.mkdir()
    path.write_text("{}")
    assert supervise(run, [DONE]) == 0


def leaves_unsaved(run):
    """The ranks agree to stop for the time limit, and save no new step."""

    def agree(variables, _emit):
        attempt = int(variables["HPCTRAIN_ATTEMPT"])
        run.log_event("signal", attempt, signal="SIGUSR2", step=3, saved=False)

    return [agree, *STOPPED]


def test_a_run_that_makes_no_progress_before_the_time_limit_ends_after_three_attempts(run):
    assert supervise(run, [leaves_unsaved(run)] * 3) == 4
    assert finished(run)["cause"].startswith(
        "3 consecutive attempts ended at the time limit without a new checkpoint (restart.time-limit.retries)"
    )
    assert finished(run)["state"] == "FAILED"


def test_a_run_that_adds_a_checkpoint_in_each_attempt_goes_on(run):
    def save(variables, _emit):
        attempt = int(variables["HPCTRAIN_ATTEMPT"])
        run.log_event("checkpoint", attempt, step=attempt + 1, path="x")

    assert supervise(run, [*([save, *leaves_unsaved(run)] for _ in range(6)), DONE]) == 0
    assert finished(run)["state"] == "COMPLETED"


def ends_unfinished(run, then, ranks=(0,)):
    """Ranks that end with exit code 0 in a training."""

    def mark(variables, _emit):
        attempt = int(variables["HPCTRAIN_ATTEMPT"])
        for rank in ranks:
            path = run.unfinished_marker(attempt, rank, "0")
            path.parent.mkdir(exist_ok=True)
            path.write_text('{"what": "Trainer.fit()", "last_step": 10}')

    return [mark, *then]


def test_a_training_that_did_not_return_has_failed_for_good(run):
    assert supervise(run, [ends_unfinished(run, DONE, (0, 1))]) == 4
    assert failure_of(run)["class"] == "unfinished"
    cause = finished(run)["cause"]
    assert cause.startswith("rank 0 on n1: the script exited with code 0 before Trainer.fit() returned, ")
    assert "before step 1 of 10: To end training early" in cause
    assert run.unfinished_files(0) == []


def test_a_training_that_did_not_return_is_the_cause_of_what_its_peers_say(run):
    def lose_peer(variables, _emit):
        record = {
            "rank": 0, "host": "n1", "kind": "exception", "error": "RuntimeError", "log": "x", "order": 1,
            "message": "Connection closed by peer", "time": 1.0,
        }  # fmt: skip
        run.write(run.failure(int(variables["HPCTRAIN_ATTEMPT"]), 0), json.dumps(record))

    then = [lose_peer, TaskExit(1, 0), TaskExit(0, 1), StepEnded(1)]
    assert supervise(run, [ends_unfinished(run, then, (0, 1))]) == 4
    assert finished(run)["cause"].startswith("rank 1 on n2: the script exited with code 0")


def test_a_row_of_the_table_has_an_unfinished_training_started_again(run):
    attempts = [ends_unfinished(run, DONE), DONE]
    assert supervise(run, attempts, restart_policy={"unfinished": {"retries": 1}}) == 0
    assert finished(run)["state"] == "COMPLETED"


def test_ranks_that_agreed_to_stop_and_ended_with_0_are_continued(run):
    stopped = ends_unfinished(run, [leaves_unsaved(run)[0], *DONE])
    assert supervise(run, [stopped, DONE]) == 0
    assert [event["class"] for event in run.read_events() if event["kind"] == "requeue"] == ["time-limit"]


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl"])
def test_a_run_whose_records_are_no_files_is_refused(tmp_path, name, capsys):
    RunDir(tmp_path).spec.write_text(spec_of(RunDir(tmp_path)).text())
    (tmp_path / name).mkdir()
    assert main([str(tmp_path)], {}) == 2
    assert f"Error: {tmp_path / name} is not a regular file" in capsys.readouterr().err
