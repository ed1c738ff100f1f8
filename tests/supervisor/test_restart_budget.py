"""The number of restarts without a new checkpoint is limited for every program."""

from itertools import count

from helpers.run_histories import event, most_attempts
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.jobspec.restart_policy import DEFAULT_RULES, EndKind, RestartPolicy
from hpctrain.supervisor.policy.decide import Action, Allocation, AttemptEnd, RunSituation, decide
from hpctrain.supervisor.policy.history import History

#: Ends of attempts that count as failures.
FAILURES = sorted(kind for kind in DEFAULT_RULES if not kind.is_stop and kind is not EndKind.STRAGGLER)
ENDS_RUN = (Action.COMPLETE, Action.FAIL)
#: More than four kinds with limits of their own allow to a program that writes files.
MOST_ATTEMPTS = 600


def number_of_attempts(policy, ends, causes, *, counts_steps, writes_files, recorded=()) -> int:
    """Run a program that loads nothing until the policy ends it; return the number of attempts."""
    events = [event("submitted")]
    for attempt, kind, cause, seconds in zip(count(), ends, causes, count(1.0), strict=False):
        assert attempt < MOST_ATTEMPTS, "the run never ends"
        events.append(event("started", attempt=attempt))
        if counts_steps:
            events.append(event("resumed", step=15 * attempt))
        if writes_files:
            events.append(event("checkpoint"))
        events += recorded
        events.append(event("failure", rank=1, host="n1", cause=cause, **{"class": kind}))
        history = History.from_events(events)
        situation = RunSituation(policy, history, nodes=Allocation(("n1", "n2")), seconds=seconds)
        decision = decide(situation, AttemptEnd(kind, cause, 4), 0.0)
        if decision.action in ENDS_RUN:
            return attempt + 1
        if decision.action is Action.REQUEUE:
            events.append(event("requeue", seconds=seconds, **{"class": kind}))
    raise AssertionError("the program ended")


def cycle(values):
    while True:
        yield from values


@settings(max_examples=100, deadline=None)
@given(
    ends=st.lists(st.sampled_from(FAILURES), min_size=1, max_size=4),
    causes=st.lists(st.sampled_from(["ValueError: x", "ValueError: y", "hung"]), min_size=1, max_size=3),
    max_failures=st.integers(1, 5),
    counts_steps=st.booleans(),
    writes_files=st.booleans(),
    recorded=st.sampled_from([(), (event("checkpoint", step=10),)]),
)
def test_program_that_loads_nothing_ends(ends, causes, max_failures, counts_steps, writes_files, recorded):
    policy = RestartPolicy.with_changes({}, max_failures)
    most = most_attempts(policy, ends, writes_files=writes_files)
    program = {"counts_steps": counts_steps, "writes_files": writes_files, "recorded": recorded}
    # The first checkpoint with a known step is progress.
    first = max_failures if recorded else 0
    assert number_of_attempts(policy, cycle(ends), cycle(causes), **program) <= most + first


def test_each_new_checkpoint_renews_the_budget():
    policy = RestartPolicy.with_changes({}, 3)
    events = []
    for step in range(1, 50):
        events += [event("checkpoint", step=step), event("failure", rank=1, **{"class": "killed"})]
        situation = RunSituation(policy, History.from_events(events))
        assert decide(situation, AttemptEnd(EndKind.KILLED), 0.0).action is Action.RESTART
