from __future__ import annotations

import json
import signal

import pytest

from hpctrain.jobs.launcher import Torchrun
from hpctrain.jobs.spec import JobSpec
from hpctrain.supervisor.command import command_of
from hpctrain.supervisor.decide import (
    MAX_STOPS,
    Action,
    Entry,
    Fate,
    History,
    Nodes,
    Outcome,
    Standing,
    Way,
    Will,
    decide,
    enter,
    ways_on,
    will_of,
)
from hpctrain.supervisor.failures import Failure, root_cause
from hpctrain.supervisor.srun import parse_task_report
from hpctrain.supervisor.step import Ending, TaskExit


@pytest.mark.parametrize(
    ("outcome", "will", "history", "action"),
    [
        (Outcome.DONE, Will.GO_ON, History(), Action.COMPLETE),
        (Outcome.DONE, Will.CANCEL, History(), Action.COMPLETE),
        (Outcome.DONE, Will.LEAVE, History(), Action.COMPLETE),
        (Outcome.STOPPED, Will.GO_ON, History(stops=0), Action.REQUEUE),
        (Outcome.STOPPED, Will.GO_ON, History(stops=MAX_STOPS - 1), Action.REQUEUE),
        (Outcome.STOPPED, Will.GO_ON, History(stops=MAX_STOPS), Action.FAIL),
        (Outcome.STOPPED, Will.CANCEL, History(), Action.CANCEL),
        (Outcome.STOPPED, Will.LEAVE, History(), Action.LEAVE),
        (Outcome.FAILED, Will.GO_ON, History(failures=1), Action.RESTART),
        (Outcome.FAILED, Will.GO_ON, History(failures=2), Action.RESTART),
        (Outcome.FAILED, Will.GO_ON, History(failures=3), Action.FAIL),
        (Outcome.FAILED, Will.GO_ON, History(failures=1, crashes=29), Action.RESTART),
        (Outcome.FAILED, Will.GO_ON, History(failures=1, crashes=30), Action.FAIL),
        (Outcome.NOT_STARTED, Will.GO_ON, History(failures=2), Action.REQUEUE),
        (Outcome.NOT_STARTED, Will.GO_ON, History(failures=3), Action.FAIL),
        (Outcome.NOT_STARTED, Will.LEAVE, History(failures=1), Action.LEAVE),
        (Outcome.FAILED, Will.CANCEL, History(failures=1), Action.CANCEL),
        (Outcome.FAILED, Will.LEAVE, History(failures=1), Action.LEAVE),
        (Outcome.OUT_OF_TIME, Will.GO_ON, History(), Action.FAIL),
        (Outcome.DOOMED, Will.GO_ON, History(failures=1), Action.FAIL),
        (Outcome.DOOMED, Will.CANCEL, History(failures=1), Action.CANCEL),
        (Outcome.DOOMED, Will.LEAVE, History(failures=1), Action.LEAVE),
        (Outcome.DONE, Will.MOVE, History(), Action.COMPLETE),
        (Outcome.STOPPED, Will.MOVE, History(), Action.REQUEUE),
        (Outcome.STOPPED, Will.MOVE, History(stops=MAX_STOPS), Action.FAIL),
        (Outcome.FAILED, Will.MOVE, History(failures=1), Action.REQUEUE),
        (Outcome.FAILED, Will.MOVE, History(failures=3), Action.FAIL),
        (Outcome.NOT_STARTED, Will.MOVE, History(failures=1), Action.REQUEUE),
        (Outcome.DOOMED, Will.MOVE, History(failures=1), Action.FAIL),
    ],
)
def test_every_row(outcome, will, history, action):
    assert decide(history, outcome, will, max_failures=3) is action


def test_a_crash_shortly_before_the_time_limit_is_no_reason_to_start_again_here():
    assert decide(History(failures=1), Outcome.FAILED, Will.GO_ON, 3, time_is_short=True) is Action.REQUEUE
    assert decide(History(failures=3), Outcome.FAILED, Will.GO_ON, 3, time_is_short=True) is Action.FAIL


@pytest.mark.parametrize(
    ("cancelled", "fate", "continue_by", "will"),
    [
        (True, Fate.STAYS, "auto", Will.CANCEL),
        (True, Fate.EVICTED, "auto", Will.CANCEL),
        (False, Fate.STAYS, "auto", Will.GO_ON),
        (False, Fate.REQUEUED, "auto", Will.LEAVE),
        (False, Fate.REQUEUED, "successor", Will.LEAVE),
        (False, Fate.EVICTED, "auto", Will.MOVE),
        (False, Fate.EVICTED, "successor", Will.MOVE),
        (False, Fate.EVICTED, "requeue", Will.LEAVE),
        (False, Fate.ENDS, "successor", Will.LEAVE),
    ],
)
def test_what_is_wanted_with_the_job(cancelled, fate, continue_by, will):
    assert will_of(cancelled=cancelled, fate=fate, continue_by=continue_by) is will


@pytest.mark.parametrize(
    ("continue_by", "will", "requeues", "ways"),
    [
        ("auto", Will.GO_ON, True, (Way.REQUEUE, Way.SUCCESSOR)),
        ("auto", Will.GO_ON, False, (Way.SUCCESSOR, Way.REQUEUE)),
        ("requeue", Will.GO_ON, True, (Way.REQUEUE,)),
        ("requeue", Will.GO_ON, False, (Way.REQUEUE,)),
        ("successor", Will.GO_ON, True, (Way.SUCCESSOR, Way.REQUEUE)),
        ("auto", Will.MOVE, True, (Way.SUCCESSOR,)),
        ("successor", Will.MOVE, False, (Way.SUCCESSOR,)),
    ],
)
def test_ways_to_another_allocation(continue_by, will, requeues, ways):
    assert ways_on(continue_by, will, requeues=requeues) == ways


@pytest.mark.parametrize(
    ("standing", "entry"),
    [
        (Standing("7", "7"), Entry.BEGIN),
        (Standing("7", None), Entry.BEGIN),
        (Standing("7", "7", ended="COMPLETED"), Entry.OVER),
        (Standing("7", "7", ended="FAILED"), Entry.BEGIN),
        (Standing("7", "7", successor="8"), Entry.SUPERSEDED),
        (Standing("7", "8", ended="COMPLETED", successor="8"), Entry.SUPERSEDED),
        (Standing("8", "8", predecessor="7", heir="8"), Entry.BEGIN),
        (Standing("8", "7", predecessor="7", heir="8"), Entry.BEGIN),
        (Standing("8", "7", predecessor="7", heir="9"), Entry.SUPERSEDED),
        (Standing("8", "20", predecessor="7", heir="8"), Entry.SUPERSEDED),
        (Standing("8", "8", predecessor="7", heir="8", successor="9"), Entry.SUPERSEDED),
        (Standing("8", "8", predecessor="7", heir="8", ended="COMPLETED"), Entry.OVER),
        (Standing("8", "7", predecessor="7", heir="8", ended="FAILED"), Entry.OVER),
        (Standing("8", "8", predecessor="7", heir="8", cancelled=True), Entry.CANCEL),
        (Standing("8", "8", predecessor="7", heir="8", cancelled=True, ended="CANCELLED"), Entry.OVER),
    ],
)
def test_what_a_job_does_when_it_starts(standing, entry):
    assert enter(standing) is entry


@pytest.mark.parametrize(
    ("outcome", "will", "failures", "nodes", "action"),
    [
        (Outcome.FAILED, Will.GO_ON, 1, Nodes(left=3, least=2, lost=1), Action.SHRINK),
        (Outcome.FAILED, Will.GO_ON, 1, Nodes(left=2, least=2, lost=2), Action.SHRINK),
        (Outcome.FAILED, Will.GO_ON, 1, Nodes(left=1, least=2, lost=1), Action.REQUEUE),
        (Outcome.FAILED, Will.GO_ON, 1, Nodes(left=3, least=4, lost=1), Action.REQUEUE),
        (Outcome.FAILED, Will.GO_ON, 3, Nodes(left=3, least=2, lost=1), Action.FAIL),
        (Outcome.FAILED, Will.GO_ON, 1, Nodes(left=4, least=2, lost=0), Action.RESTART),
        (Outcome.FAILED, Will.CANCEL, 1, Nodes(left=3, least=2, lost=1), Action.CANCEL),
        (Outcome.FAILED, Will.LEAVE, 1, Nodes(left=3, least=2, lost=1), Action.LEAVE),
        (Outcome.FAILED, Will.MOVE, 1, Nodes(left=3, least=2, lost=1), Action.REQUEUE),
        (Outcome.NOT_STARTED, Will.GO_ON, 1, Nodes(left=3, least=2, lost=1), Action.SHRINK),
        (Outcome.NOT_STARTED, Will.GO_ON, 1, Nodes(left=1, least=2, lost=1), Action.REQUEUE),
        (Outcome.NOT_STARTED, Will.GO_ON, 1, Nodes(left=4, least=2, lost=0), Action.REQUEUE),
    ],
)
def test_nodes_that_are_lost(outcome, will, failures, nodes, action):
    assert decide(History(failures), outcome, will, max_failures=3, nodes=nodes) is action


def test_short_time_counts_for_nodes_that_are_lost_too():
    nodes = Nodes(left=3, least=2, lost=1)
    assert (
        decide(History(1), Outcome.FAILED, Will.GO_ON, 3, time_is_short=True, nodes=nodes) is Action.REQUEUE
    )


def event(kind, **fields):
    return {"kind": kind, **fields}


FAILURE, REQUEUE = event("failure", rank=1), event("requeue", seconds=20.0)


@pytest.mark.parametrize(
    ("events", "history"),
    [
        ([], History()),
        ([FAILURE, FAILURE], History(failures=2, crashes=2)),
        ([FAILURE, event("checkpoint", step=5), FAILURE], History(failures=1, crashes=1)),
        (
            [event("checkpoint", step=5), FAILURE, event("checkpoint", step=5), FAILURE],
            History(failures=2, crashes=2),
        ),
        ([REQUEUE, REQUEUE, FAILURE], History(failures=1, stops=2, crashes=1)),
        # Of a script's own checkpoints only that there is a new one is known.
        ([FAILURE, REQUEUE, event("checkpoint", step=None), FAILURE], History(failures=1, crashes=2)),
        ([FAILURE, REQUEUE, event("submitted")], History()),
        # That a node was lost is no crash of the script.
        ([FAILURE, event("shrink"), FAILURE], History(failures=1, crashes=1)),
        ([FAILURE, REQUEUE, event("submitted", after="7")], History(failures=1, stops=1, crashes=1)),
        # A script that saves by its own means is not given up because it is preempted every hour.
        ([REQUEUE, REQUEUE, event("requeue", seconds=3600.0)], History()),
        ([event("failure", cause="a checkpoint was not written")], History()),
    ],
)
def test_history(events, history):
    assert History.of(events) == history


@pytest.mark.parametrize(
    ("line", "tasks"),
    [
        ("srun: error: n3: task 5: Killed", [TaskExit(5, None, signal.SIGKILL)]),
        ("srun: error: n1: tasks 0-1,3: Exited with exit code 75", [TaskExit(r, 75) for r in (0, 1, 3)]),
        ("srun: error: n1: task 2: Segmentation fault (core dumped)", [TaskExit(2, None, signal.SIGSEGV)]),
        ("srun: error: n1: task 2: Terminated", [TaskExit(2, None, signal.SIGTERM)]),
        (
            "srun: error: n1: task 2: Out Of Memory",
            [TaskExit(2, None, signal.SIGKILL, out_of_memory=True)],
        ),
        ("srun: launch/slurm: _step_signal: Terminating StepId=1.0", []),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED ***", []),
    ],
)
def test_sruns_reports(line, tasks):
    assert parse_task_report(line + "\n") == tasks


@pytest.mark.parametrize(
    ("task", "ending"),
    [
        (TaskExit(0, 0), Ending.DONE),
        (TaskExit(0, 75), Ending.CONTINUE),
        (TaskExit(0, None, signal.SIGTERM), Ending.CONTINUE),
        (TaskExit(0, None, signal.SIGUSR2), Ending.CONTINUE),
        (TaskExit(0, None, signal.SIGKILL), Ending.FAILED),
        (TaskExit(0, 1), Ending.FAILED),
    ],
)
def test_endings(task, ending):
    assert task.ending is ending


def failure(rank, kind="exception", error="ValueError", message="", order=None, time=0.0):
    return Failure(rank, "n1", kind, error, message, "log", order, time)


LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, message=LOST, order=2), failure(3, message="bad data", order=1)], 3),
        # Clocks of hosts differ; the store's count does not.
        ([failure(0, order=2, time=1.0), failure(3, order=1, time=2.0)], 3),
        # A killed rank cannot write; its peers shout first.
        ([failure(0, message=LOST, order=1), failure(5, "signal", "SIGKILL", time=9.0)], 5),
        ([failure(0, message="my own words for a lost peer", order=1), failure(5, "signal", "SIGKILL")], 5),
        # NCCL's watchdog aborts ranks whose peer failed.
        ([failure(0, "signal", "SIGABRT"), failure(2, message="bad data", order=1)], 2),
        ([failure(4, message=LOST, order=2), failure(1, message=LOST, order=1)], 1),
    ],
)
def test_root_cause(failures, rank):
    assert root_cause(failures).rank == rank
    assert root_cause(failures[::-1]).rank == rank


def test_agents_are_told_how_many_nodes_there_are():
    spec = JobSpec(
        script="/x.py",
        name="x",
        run_id="x",
        run_dir="/x",
        backend="slurm",
        nodes=4,
        min_nodes=2,
        python="python",
        workdir="/",
        torchrun=Torchrun(),
    )
    assert json.loads(command_of(spec, 3)[-1])["nodes"] == 3
