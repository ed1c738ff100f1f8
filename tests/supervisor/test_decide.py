"""The decision after an attempt: every row of docs/restart-policy.md, and the rules around the table."""

import re
import signal
from dataclasses import replace

import pytest
from helpers import REPOSITORY
from helpers.run_histories import event, make_spec

from hpctrain.jobspec.restart_policy import (
    DEFAULT_RULES,
    END_KINDS,
    RESTART_ACTIONS,
    EndKind,
    RestartPolicy,
    RestartRule,
)
from hpctrain.rundir import RunDir
from hpctrain.slurm.srun_step import TaskExit, parse_task_report
from hpctrain.supervisor.failures.root_cause import (
    RankFailure,
    classify,
    collect_failures,
    is_deterministic,
    killed_tasks,
    root_cause,
)
from hpctrain.supervisor.policy.decide import (
    Action,
    Allocation,
    AttemptEnd,
    Decision,
    RunSituation,
    decide,
    suspect_nodes,
)
from hpctrain.supervisor.policy.history import History, PastFailure
from hpctrain.supervisor.policy.job_intent import (
    ContinuationMethod,
    JobDisposition,
    JobIntent,
    OwnershipDecision,
    OwnershipState,
    continuation_methods,
    decide_ownership,
    resolve_intent,
)

POLICY = RestartPolicy.with_changes({}, max_failures=3)
FOUR = ("n1", "n2", "n3", "n4")


def rows() -> dict[str, tuple[str, RestartRule]]:
    """Return the rows of the table: the action and the numbers."""
    text = (REPOSITORY / "docs" / "restart-policy.md").read_text()
    table = re.findall(
        r"^\| `([a-z-]+)` \| [^|]+ \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
    )
    number = {"–": None, "`--max-failures`": None}
    return {
        kind: (
            action_name,
            RestartRule(
                number[retries] if retries in number else int(retries),
                number[repeats] if repeats in number else int(repeats),
                0 if exclude == "–" else int(exclude),
            ),
        )
        for kind, action_name, retries, repeats, exclude in table
    }


def test_documentation_has_the_causes_and_actions_that_explain_prints():
    text = (REPOSITORY / "docs" / "restart-policy.md").read_text()
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text)
    for kind, info in END_KINDS.items():
        assert kind is EndKind.DONE or f"| `{kind}` | {info.cause} | {info.action} |" in plain
    for name, meaning in RESTART_ACTIONS.items():
        assert f"| {name} | {meaning} |" in plain


def failed(kind, count, host="n2", causes=None):
    """Return a history of failures of a kind, each on its own node unless `host` is given."""
    past = [PastFailure(kind, host, str(i) if causes is None else causes) for i in range(count)]
    return History(past, [failure_.kind for failure_ in past])


def after(
    kind, count=1, *, nodes=None, intent=JobIntent.CONTINUE, policy=POLICY, causes=None, host=None, **fields
) -> Decision:
    history = History(stops=[kind] * count) if kind.is_stop else failed(kind, count, host, causes)
    fields = {"larger_memory": "mem=96"} | fields
    state = RunSituation(policy, history, intent, nodes or Allocation(FOUR, min_nodes=4), **fields)
    return decide(state, AttemptEnd(kind, "cause", 4 if kind is EndKind.GPU_OOM else None), now=0.0)


def test_out_of_memory_is_retried_only_with_a_change_or_after_a_new_checkpoint():
    assert after(EndKind.OOM).memory == "mem=96"
    assert after(EndKind.OOM, larger_memory=None).action is Action.FAIL
    assert "--mem" in after(EndKind.OOM, larger_memory=None).reason

    def end(kind, size=None, **history):
        state = RunSituation(POLICY, History(**history), nodes=Allocation(FOUR, min_nodes=4))
        return decide(state, AttemptEnd(kind, "cause", size), now=0.0)

    assert end(EndKind.GPU_OOM, 4).action is Action.RESTART
    assert end(EndKind.GPU_OOM).action is Action.FAIL
    assert "micro_batch_size" in end(EndKind.GPU_OOM).reason
    assert end(EndKind.GPU_OOM, has_saved=True).action is Action.RESTART
    assert end(EndKind.OOM, has_saved=True).action is Action.RESTART


def test_changes_after_a_lack_of_memory_last_until_the_user_submits_again():
    events = [
        event("submitted", job_id="1"),
        event("started"),
        event("checkpoint", step=2),
        event("failure", **{"rank": 0, "class": "gpu-oom", "micro_batch_size": 4}),
        event("started"),
        event("failure", **{"rank": 0, "class": "oom"}),
        event("requeue", **{"class": "oom", "memory": "mem=96"}),
        event("submitted", job_id="2", after="1"),
    ]
    assert History.from_events(events[:4]).has_saved
    history = History.from_events([*events, event("requeue", **{"class": "preempted"})])
    assert (history.memory, history.micro_batch_size, history.has_saved) == ("mem=96", 4, False)
    history = History.from_events([*events, event("submitted", job_id="3")])
    assert (history.memory, history.micro_batch_size) == (None, None)


def test_table_matches_the_documentation():
    assert {EndKind(kind): row for kind, (_, row) in rows().items()} == dict(DEFAULT_RULES)


@pytest.mark.parametrize("kind", rows())
def test_every_row_of_the_table(kind):
    action_name, row = rows()[kind]
    kind = EndKind(kind)
    if kind is EndKind.STRAGGLER:
        return  # Not the end of an attempt: see test_faulty_nodes_are_excluded.
    max_count = POLICY.max_failures - 1 if row.retries is None else row.retries
    action = {"restart": Action.RESTART, "requeue": Action.REQUEUE, "end": Action.FAIL}[action_name]
    if kind.is_stop:
        # The first stop is not a retry: only earlier requeues count.
        assert [after(kind, n).action for n in (0, max_count - 1, max_count)] == [action, action, Action.FAIL]
        assert f"--restart-policy {kind}.retries" in after(kind, max_count).reason
        return
    assert [after(kind, n).action for n in range(1, max_count + 1)] == [action] * max_count
    end = after(kind, max_count + 1)
    assert end.action is Action.FAIL
    if row.repeats is not None:
        assert after(kind, row.repeats, causes="same").action is action
        repeated = after(kind, row.repeats + 1, causes="same")
        assert repeated.action is Action.FAIL
        assert "the same" in repeated.reason


@pytest.mark.parametrize("kind", [kind for kind in DEFAULT_RULES if kind is not EndKind.STRAGGLER])
@pytest.mark.parametrize(
    ("intent", "action"), [(JobIntent.CANCEL, Action.CANCEL), (JobIntent.YIELD, Action.LEAVE)]
)
def test_cancel_and_yield_take_precedence(kind, intent, action):
    assert after(kind, 99, intent=intent).action is action


@pytest.mark.parametrize("intent", JobIntent)
def test_completed_attempt_completes_the_run(intent):
    assert after(EndKind.DONE, 99, intent=intent).action is Action.COMPLETE


@pytest.mark.parametrize("kind", [kind for kind in DEFAULT_RULES if kind is not EndKind.STRAGGLER])
def test_run_in_an_ending_job_is_requeued_unless_it_failed(kind):
    action = after(kind, 1, intent=JobIntent.RELOCATE).action
    assert action is (Action.FAIL if rows()[kind][0] == "end" else Action.REQUEUE)


def test_kinds_without_a_number_share_max_failures():
    history = History(
        [PastFailure(EndKind.KILLED), PastFailure(EndKind.COMMUNICATION), PastFailure(EndKind.PYTHON)], []
    )
    decision = decide(RunSituation(POLICY, history), AttemptEnd(EndKind.PYTHON), 0.0)
    assert decision.action is Action.FAIL
    assert decision.reason == "3 consecutive failures without a new checkpoint (limit: --max-failures)"
    others = History([PastFailure(EndKind.OOM), PastFailure(EndKind.GPU), PastFailure(EndKind.PYTHON)], [])
    assert decide(RunSituation(POLICY, others), AttemptEnd(EndKind.PYTHON), 0.0).action is Action.RESTART


@pytest.mark.parametrize(
    ("seconds", "agreed", "action"),
    [(20.0, False, Action.FAIL), (3600.0, True, Action.FAIL), (3600.0, False, Action.REQUEUE)],
)
def test_attempts_without_progress_at_the_time_limit_end_the_run(seconds, agreed, action):
    """A long attempt may have saved by its own means, unless its ranks agreed to stop."""
    history = History(stops=[EndKind.TIME_LIMIT] * 2, agreed_to_stop=agreed)
    decision = decide(RunSituation(POLICY, history, seconds=seconds), AttemptEnd(EndKind.TIME_LIMIT), 0.0)
    assert decision.action is action
    if action is Action.FAIL:
        assert decision.reason.startswith(
            "3 consecutive attempts ended at the time limit without a new checkpoint"
        )
        assert "--time" in decision.reason


def test_rules_can_be_changed():
    changes = {"killed": {"retries": 5}, "python": {"repeats": 0}, "gpu": {"exclude": 0}}
    changes |= {"user-error": {"retries": 1}, "out-of-time": {"retries": 1}}
    policy = RestartPolicy.with_changes(changes, 3)
    assert [after(EndKind.KILLED, n, policy=policy).action for n in (5, 6)] == [Action.RESTART, Action.FAIL]
    assert after(EndKind.PYTHON, 1, policy=policy).action is Action.FAIL
    assert suspect_nodes(policy, failed(EndKind.GPU, 1)) == {}
    for kind in (EndKind.USER_ERROR, EndKind.OUT_OF_TIME):
        assert after(kind, policy=policy).action is Action.RESTART


def test_crash_shortly_before_the_time_limit_requeues():
    assert after(EndKind.KILLED, ends_at=100.0, lead_s=100.0).action is Action.REQUEUE
    assert after(EndKind.KILLED, ends_at=101.0, lead_s=100.0).action is Action.RESTART
    assert after(EndKind.KILLED, 3, ends_at=100.0, lead_s=100.0).action is Action.FAIL


def test_a_device_that_computes_wrong_results_again_ends_the_run_only_if_its_node_stays():
    history = replace(failed(EndKind.CORRUPTION, 1), faulty_devices=("GPU-7 on n2", "GPU-7 on n2"))

    def end(history, **nodes):
        situation = RunSituation(POLICY, history, nodes=Allocation(FOUR, **{"min_nodes": 4, **nodes}))
        return decide(situation, AttemptEnd(EndKind.CORRUPTION, "cause"), 0.0)

    assert end(history).action is Action.FAIL
    assert "GPU-7 on n2 computed wrong results 2 times" in end(history).reason
    assert end(history, min_nodes=3).action is Action.SHRINK
    assert end(history, can_reallocate=True).action is Action.REQUEUE
    excluded = replace(history, excluded=frozenset({"n2"}))
    assert end(excluded, can_reallocate=True).action is Action.FAIL
    for devices in (("GPU-7 on n2", "GPU-8 on n2"), (None, None)):
        decision = end(replace(history, faulty_devices=devices))
        assert (decision.action, decision.hosts) == (Action.RESTART, FOUR)
        assert "n2 may compute wrong results again" in str(decision)


LOST = {"n3": "slurmd is not responding"}


@pytest.mark.parametrize(
    ("kind", "spares", "lost", "min_nodes", "action", "hosts"),
    [
        (EndKind.NODE_LOST, (), LOST, 2, Action.SHRINK, ("n1", "n2", "n4")),
        (EndKind.NODE_LOST, (), LOST, 4, Action.REQUEUE, ()),
        (EndKind.NODE_LOST, ("n5", "n6"), LOST, 4, Action.REPLACE, ("n1", "n2", "n4", "n5")),
        (EndKind.NODE_LOST, ("n5",), {**LOST, "n5": "down"}, 4, Action.REQUEUE, ()),
        (EndKind.NODE_LOST, ("n5",), {**LOST, "n1": "down"}, 3, Action.SHRINK, ("n2", "n4", "n5")),
        (EndKind.NOT_STARTED, (), LOST, 2, Action.SHRINK, ("n1", "n2", "n4")),
        (EndKind.NOT_STARTED, (), {}, 2, Action.REQUEUE, ()),
        (EndKind.KILLED, (), {}, 2, Action.RESTART, FOUR),
    ],
)
def test_lost_nodes_shrink_replace_or_requeue(kind, spares, lost, min_nodes, action, hosts):
    decision = after(kind, nodes=Allocation(FOUR, spares, lost, min_nodes))
    assert (decision.action, decision.hosts) == (action, hosts)


@pytest.mark.parametrize(
    ("nodes", "action", "hosts", "excluded"),
    [
        # Another node is available, or fewer suffice.
        (Allocation(FOUR, min_nodes=2), Action.SHRINK, ("n1", "n3", "n4"), ["n2"]),
        (Allocation(FOUR, ("n5",), min_nodes=4), Action.REPLACE, ("n1", "n3", "n4", "n5"), ["n2"]),
        # Other nodes exist elsewhere.
        (Allocation(FOUR, min_nodes=4, can_reallocate=True), Action.REQUEUE, (), ["n2"]),
        # There are none: a faulty node is better than waiting forever.
        (Allocation(FOUR, min_nodes=4), Action.RESTART, FOUR, []),
    ],
)
@pytest.mark.parametrize(
    "kind", [kind for kind, row in DEFAULT_RULES.items() if row.exclude and kind is not EndKind.STRAGGLER]
)
def test_faulty_nodes_are_excluded(kind, nodes, action, hosts, excluded):
    enough = DEFAULT_RULES[kind].exclude
    decision = after(kind, enough, nodes=nodes, host="n2")
    assert (decision.action, decision.hosts, list(decision.exclude)) == (action, hosts, excluded)
    fewer = after(kind, enough - 1, nodes=nodes, host="n2")
    assert (fewer.action, fewer.exclude) == (Action.RESTART, {})


def test_lasting_straggler_is_excluded_at_the_next_start():
    history = replace(failed(EndKind.KILLED, 1), slow_nodes=("n4", "n4"))
    decision = decide(
        RunSituation(POLICY, history, nodes=Allocation(FOUR, min_nodes=2)), AttemptEnd(EndKind.KILLED), 0.0
    )
    assert (decision.hosts, dict(decision.exclude)) == (
        ("n1", "n2", "n3"),
        {"n4": "2 failures of kind straggler"},
    )
    stopped = replace(history, failures=(), stops=())
    state = RunSituation(POLICY, stopped, nodes=Allocation(FOUR, min_nodes=4, can_reallocate=True))
    assert list(decide(state, AttemptEnd(EndKind.PREEMPTED), 0.0).exclude) == ["n4"]
    assert suspect_nodes(POLICY, replace(history, excluded=frozenset({"n4"}))) == {}


@pytest.mark.parametrize(
    ("cancelled", "disposition", "resume_mode", "intent"),
    [
        (True, JobDisposition.STAYS, "auto", JobIntent.CANCEL),
        (True, JobDisposition.EVICTED, "auto", JobIntent.CANCEL),
        (False, JobDisposition.STAYS, "auto", JobIntent.CONTINUE),
        (False, JobDisposition.REQUEUED, "auto", JobIntent.YIELD),
        (False, JobDisposition.REQUEUED, "successor", JobIntent.YIELD),
        (False, JobDisposition.EVICTED, "auto", JobIntent.RELOCATE),
        (False, JobDisposition.EVICTED, "successor", JobIntent.RELOCATE),
        (False, JobDisposition.EVICTED, "requeue", JobIntent.YIELD),
        (False, JobDisposition.ENDS, "successor", JobIntent.YIELD),
    ],
)
def test_intent_of_a_job(cancelled, disposition, resume_mode, intent):
    assert resolve_intent(cancelled=cancelled, disposition=disposition, resume_mode=resume_mode) is intent


REQUEUE_JOB, SUCCESSOR = ContinuationMethod


@pytest.mark.parametrize(
    ("resume_mode", "intent", "requeues", "methods"),
    [
        ("auto", JobIntent.CONTINUE, True, (REQUEUE_JOB, SUCCESSOR)),
        ("auto", JobIntent.CONTINUE, False, (SUCCESSOR, REQUEUE_JOB)),
        ("requeue", JobIntent.CONTINUE, True, (REQUEUE_JOB,)),
        ("requeue", JobIntent.CONTINUE, False, (REQUEUE_JOB,)),
        ("successor", JobIntent.CONTINUE, True, (SUCCESSOR, REQUEUE_JOB)),
        ("auto", JobIntent.RELOCATE, True, (SUCCESSOR,)),
        ("successor", JobIntent.RELOCATE, False, (SUCCESSOR,)),
    ],
)
def test_continuation_methods_are_ordered_by_mode(resume_mode, intent, requeues, methods):
    assert continuation_methods(resume_mode, intent, can_requeue=requeues) == methods


BEGIN, OVER, SUPERSEDED, CANCEL = OwnershipDecision
State = OwnershipState


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        (State("7", "7"), BEGIN),
        (State("7", None), BEGIN),
        (State("7", "7", ended="COMPLETED"), OVER),
        (State("7", "7", ended="FAILED"), OVER),
        (State("7", "7", successor="8"), SUPERSEDED),
        (State("7", "8", ended="COMPLETED", successor="8"), SUPERSEDED),
        (State("8", "8", predecessor="7", claimed_by="8"), BEGIN),
        (State("8", "7", predecessor="7", claimed_by="8"), BEGIN),
        (State("8", "7", predecessor="7", claimed_by="9"), SUPERSEDED),
        (State("8", "20", predecessor="7", claimed_by="8"), SUPERSEDED),
        (State("8", "9", "7", predecessor="7", claimed_by="8"), BEGIN),
        (State("9", "9", "7", predecessor="7", claimed_by="8"), SUPERSEDED),
        (State("8", "8", predecessor="7", claimed_by="8", successor="9"), SUPERSEDED),
        (State("8", "8", predecessor="7", claimed_by="8", ended="COMPLETED"), OVER),
        (State("8", "7", predecessor="7", claimed_by="8", ended="FAILED"), OVER),
        (State("8", "8", predecessor="7", claimed_by="8", cancelled=True), CANCEL),
        (State("8", "8", predecessor="7", claimed_by="8", cancelled=True, ended="CANCELLED"), OVER),
    ],
)
def test_ownership_decision_at_the_start_of_a_job(state, decision):
    assert decide_ownership(state) is decision


FAILURE, SECOND_FAILURE = (
    event("failure", rank=n, host=f"n{n}", cause=f"rank {n} on n{n}: KeyError: 'x'", **{"class": "python"})
    for n in (1, 2)
)
REQUEUE = event("requeue", seconds=20.0, **{"class": "time-limit"})
NO_PROGRESS = [
    event("started"),
    event("signal", saved=False),
    event("requeue", seconds=3600.0, **{"class": "time-limit"}),
]
P1, P2 = (PastFailure(EndKind.PYTHON, host, "KeyError: 'x'") for host in ("n1", "n2"))
K, T = EndKind.PYTHON, EndKind.TIME_LIMIT


@pytest.mark.parametrize(
    ("events", "history"),
    [
        ([], History()),
        ([FAILURE, SECOND_FAILURE], History([P1, P2], [K, K])),
        ([FAILURE, event("checkpoint", step=5), SECOND_FAILURE], History([P2], [K], has_saved=True)),
        (
            [event("checkpoint", step=5), FAILURE, event("checkpoint", step=5), SECOND_FAILURE],
            History([P1, P2], [K, K], has_saved=True),
        ),
        ([REQUEUE, REQUEUE, FAILURE], History([P1], [K], [T, T])),
        # Of a script's own checkpoints, only their existence is known.
        ([FAILURE, REQUEUE, event("checkpoint", step=None), SECOND_FAILURE], History([P2], [K, K])),
        ([FAILURE, REQUEUE, event("excluded", hosts=["n1"]), event("submitted")], History()),
        ([FAILURE, REQUEUE, event("submitted", after="7")], History([P1], [K], [T])),
        # A script that saves by its own means must not be ended because of hourly preemptions.
        ([REQUEUE, REQUEUE, event("requeue", seconds=3600.0)], History()),
        # Slurm logged neither the reason nor the time.
        ([REQUEUE, REQUEUE, event("requeue", by="slurm")], History()),
        # The checkpoints of ranks that agreed to stop are known, so long attempts count, too.
        ([*NO_PROGRESS, *NO_PROGRESS], History([], [], [T, T], agreed_to_stop=True)),
        ([*NO_PROGRESS, event("started")], History([], [], [T])),
        (
            [*NO_PROGRESS, event("checkpoint", step=5), *NO_PROGRESS[1:]],
            History(agreed_to_stop=True, has_saved=True),
        ),
        (
            [event("signal"), event("requeue", seconds=3600.0, **{"class": "preempted"})],
            History(agreed_to_stop=True),
        ),
        ([event("failure", cause="a checkpoint was not written")], History()),
        ([event("excluded", hosts=["n1", "n2"])], History(excluded=frozenset({"n1", "n2"}))),
        ([event("straggler", host="n3"), event("straggler", host="n3")], History(slow_nodes=["n3", "n3"])),
        ([event("straggler", host="n3", lasting=False)], History()),
        # Written by an older version.
        (
            [
                event("failure", rank=1, host="n1", cause="rank 1 on n1: SIGKILL"),
                event("requeue", seconds=1.0),
            ],
            History([PastFailure(EndKind.KILLED, "n1", "SIGKILL")], [EndKind.KILLED], [EndKind.PREEMPTED]),
        ),
    ],
)
def test_history_is_read_from_events(events, history):
    assert History.from_events(events) == history


def test_same_failure_is_recognized_on_any_rank_and_at_any_address():
    causes = ("bad thing at 0x7f01", "bad thing at 0x7f99", "another")
    failures = [
        event("failure", rank=i, host="n1", cause=f"rank {i} on n1: {text}") for i, text in enumerate(causes)
    ]
    assert History.from_events(failures[:2]).consecutive_identical() == 2
    assert History.from_events(failures).consecutive_identical() == 1


def test_resumption_from_a_later_step_is_progress():
    """Copies in memory have no checkpoint event of their own."""
    failure = event("failure", rank=1, host="n1", cause="x", **{"class": "killed"})
    resumed = event("resumed", step=10, checkpoint="x")
    events = [event("checkpoint", step=10), failure, resumed, failure]
    assert len(History.from_events(events).failures) == 2
    assert History.from_events([*events, event("resumed", step=12, checkpoint="x")]).failures == []
    assert History.from_events([*events, event("resumed", step=12, is_loaded=True)]).failures == []
    # The steps that a script counts prove no checkpoint.
    assert len(History.from_events([*events, event("resumed", step=12)]).failures) == 2
    assert len(History.from_events([*events, event("resumed", step=10, is_loaded=True)]).failures) == 2


def test_limit_to_verified_checkpoints_ends_when_the_run_has_resumed():
    found = {"class": "corruption", "rank": 1, "host": "n1", "cause": "x", "verified_step": 40}
    events = [event("failure", device="GPU-7", **found), event("started")]
    assert History.from_events(events).resume_limit == 40
    for kind in ("resumed", "checkpoint", "memory_copy"):
        assert History.from_events([*events, event(kind, step=40)]).resume_limit is None


@pytest.mark.parametrize(
    ("line", "tasks"),
    [
        ("srun: error: n3: task 5: Killed", [TaskExit(5, None, signal.SIGKILL)]),
        ("srun: error: n1: tasks 0-1,3: Exited with exit code 75", [TaskExit(r, 75) for r in (0, 1, 3)]),
        ("srun: error: n1: task 2: Segmentation fault (core dumped)", [TaskExit(2, None, signal.SIGSEGV)]),
        ("srun: error: n1: task 2: Terminated", [TaskExit(2, None, signal.SIGTERM)]),
        ("srun: error: n1: task 2: Out Of Memory", [TaskExit(2, None, signal.SIGKILL, out_of_memory=True)]),
        ("srun: launch/slurm: _step_signal: Terminating StepId=1.0", []),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED ***", []),
    ],
)
def test_srun_task_reports_are_parsed(line, tasks):
    assert parse_task_report(line + "\n") == tasks


def test_worker_that_failed_first_is_the_cause_in_a_report_of_torchrun(tmp_path):
    """The report of torch 2.13, with other failures before the first one."""
    worker = (
        "  time      : 2026-11-30_02:08:57\n  host      : n{}.example.org\n  rank      : {} (local_rank: 0)\n"
        "  exitcode  : {} (pid: 17)\n  error_file: <N/A>\n  traceback : Signal received\n"
    )
    run = RunDir(tmp_path)
    run.slurm_log.parent.mkdir()
    run.slurm_log.write_text(
        "train.py FAILED\nFailures:\n"
        f"[1]:\n{worker.format(1, 0, -6)}[2]:\n{worker.format(2, 3, 1)}{'-' * 60}\n"
        f"Root Cause (first observed failure):\n[0]:\n{worker.format(2, 2, -9)}"
        "srun: error: n1: task 0: Exited with exit code 1\n"
    )
    (killed,) = killed_tasks(run.slurm_log, 0)
    assert (killed.rank, killed.host, killed.error) == (2, "n2.example.org", "SIGKILL")
    # No other node is blamed if Slurm's names are unlike those of the hosts.
    for nodes, host in ((["n1", "n2"], "n2"), (["a", "b"], ""), (["local-0"], "local-0")):
        (failed,) = collect_failures(run, make_spec(tmp_path, program="batch"), 0, [], nodes)
        assert failed.host == host
        run.failure(0, 2).unlink()


def failure(rank, kind="exception", error="ValueError", message="", order=None, time=0.0, **fields):
    return RankFailure(rank, "n1", kind, error, message, "log", order, time, **fields)


@pytest.mark.parametrize(
    ("error", "message", "bases", "kind", "deterministic"),
    [
        ("ValueError", "", (), EndKind.PYTHON, True),
        ("FileNotFoundError", "", ("OSError",), EndKind.PYTHON, False),
        ("MemoryError", "", (), EndKind.OOM, True),
        ("RuntimeError", "can't allocate memory: you tried", (), EndKind.OOM, True),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate", (), EndKind.GPU_OOM, True),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", (), EndKind.GPU_OOM, True),
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", (), EndKind.GPU, False),
        ("AcceleratorError", "CUDA error: device-side assert triggered", (), EndKind.PYTHON, False),
        ("DistBackendError", "", ("DistError",), EndKind.COMMUNICATION, False),
        ("RuntimeError", "NCCL error: unhandled system error", (), EndKind.COMMUNICATION, True),
        ("ValueError", "[gloo] Connection closed by peer", (), EndKind.COMMUNICATION, True),
        ("RendezvousError", "", ("HpctrainError",), EndKind.COMMUNICATION, False),
        ("DiskFull", "", ("CheckpointError",), EndKind.DISK_FULL, False),
    ],
)
def test_exceptions_are_classified(error, message, bases, kind, deterministic):
    rank_failure = failure(0, error=error, message=message, classes=(error, *bases, "Exception"))
    assert (classify(rank_failure), is_deterministic(rank_failure)) == (kind, deterministic)


@pytest.mark.parametrize(
    ("kind_of_exit", "error", "out_of_memory", "kind"),
    [
        ("signal", "SIGKILL", True, EndKind.OOM),
        ("signal", "SIGKILL", False, EndKind.KILLED),
        ("signal", "SIGSEGV", False, EndKind.SIGNAL),
        ("exit", "exit code 3", False, EndKind.PYTHON),
        ("unfinished", "the script exited with code 0", False, EndKind.UNFINISHED),
    ],
)
def test_exits_are_classified(kind_of_exit, error, out_of_memory, kind):
    rank_failure = failure(0, kind_of_exit, error, out_of_memory=out_of_memory)
    assert (classify(rank_failure), is_deterministic(rank_failure)) == (kind, False)


PEER_LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, message=PEER_LOST, order=2), failure(3, message="bad data", order=1)], 3),
        # Clocks of hosts differ; the store's counter does not.
        ([failure(0, order=2, time=1.0), failure(3, order=1, time=2.0)], 3),
        # A killed rank cannot write a file; its peers do so first.
        ([failure(0, message=PEER_LOST, order=1), failure(5, "signal", "SIGKILL", time=9.0)], 5),
        ([failure(0, message="my own words for a lost peer", order=1), failure(5, "signal", "SIGKILL")], 5),
        # NCCL's watchdog aborts ranks whose peer failed.
        ([failure(0, "signal", "SIGABRT"), failure(2, message="bad data", order=1)], 2),
        ([failure(4, message=PEER_LOST, order=2), failure(1, message=PEER_LOST, order=1)], 1),
    ],
)
def test_root_cause_is_found_in_any_order(failures, rank):
    assert root_cause(failures).rank == rank
    assert root_cause(failures[::-1]).rank == rank
