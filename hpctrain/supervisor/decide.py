"""What to do after an attempt: a pure function of what happened so far.

What each kind of end is good for is a row of `hpctrain.jobs.restart`, and of docs/restart-policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hpctrain.jobs.restart import Kind, Policy
from hpctrain.supervisor.history import History
from hpctrain.supervisor.will import Will

#: Files that a script writes may say nothing of its progress: one that starts anew writes them anew.
#: So the crashes between which it only wrote files are at most this many times as many as those in a row.
CRASHES_PER_FAILURE = 10


@dataclass(frozen=True)
class Nodes:
    """How an allocation stands after an attempt."""

    in_use: tuple[str, ...] = ("n1",)
    """Those with ranks in the attempt, in order of their rank."""
    spare: tuple[str, ...] = ()
    """Those that wait to take the place of another."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Those on which nothing can run any more, and why."""
    least: int = 1
    """How many the run needs to go on."""
    others_fit: bool = False
    """Whether the scheduler could start the job on other nodes than those that are to be left out."""

    def usable(self, left_out: frozenset[str]) -> tuple[str, ...]:
        """Those that can have ranks, as many as were in use: spares fill the places of others."""
        good = [
            host for host in (*self.in_use, *self.spare) if host not in self.lost and host not in left_out
        ]
        return tuple(good[: len(self.in_use)])


@dataclass(frozen=True)
class State:
    """Where a run stands when an attempt has ended."""

    policy: Policy
    history: History = field(default_factory=History)
    """What has happened, this attempt's own failure included."""
    will: Will = Will.GO_ON
    nodes: Nodes = field(default_factory=Nodes)
    ends_at: float | None = None
    """When the job's time is over; None where it has no limit, or nobody knows."""
    lead_s: float = 0.0
    """Seconds before that at which the ranks are told to stop."""


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    kind: Kind
    cause: str | None = None


class Action(Enum):
    """What to do now."""

    RESTART = "restart"
    """Start the workers again inside the allocation."""
    SHRINK = "shrink"
    """Start the workers again on the nodes that are left of the allocation."""
    REPLACE = "replace"
    """Start the workers again, on spare nodes in the place of others."""
    REQUEUE = "requeue"
    """Give the allocation back and ask for another."""
    LEAVE = "leave"
    """End without a verdict: the scheduler has taken over."""
    COMPLETE = "complete"
    CANCEL = "cancel"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    """What to do now, and why."""

    action: Action
    hosts: tuple[str, ...] = ()
    """The nodes of the next start in this allocation."""
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Nodes that are left out from now on, and why."""
    why: str | None = None
    """What ends the run, besides the cause of the attempt's end."""


def decide(state: State, end: End, now: float) -> Decision:
    """What follows from how an attempt ended.

    Args:
        state: where the run stands.
        end: how the attempt ended.
        now: on the clock of `state.ends_at`.
    """
    match end.kind, state.will:
        case Kind.DONE, _:
            return Decision(Action.COMPLETE)
        case _, Will.CANCEL:
            return Decision(Action.CANCEL)
        case _, Will.LEAVE:
            return Decision(Action.LEAVE)
    if (why := _spent(state, end.kind)) is not None:
        return Decision(Action.FAIL, why=why)
    if end.kind.is_stop:
        return Decision(Action.REQUEUE, exclude=_left_out(state, here=False))
    in_time = state.ends_at is None or state.ends_at - now > state.lead_s
    if in_time and state.will is Will.GO_ON:
        exclude = _left_out(state, here=True)
        hosts = state.nodes.usable(state.history.excluded.union(exclude))
        if (
            hosts
            and len(hosts) >= state.nodes.least
            and (end.kind is not Kind.NOT_STARTED or state.nodes.lost)
        ):
            return Decision(_action(state.nodes.in_use, hosts), hosts, exclude)
        usable = state.nodes.usable(frozenset())
        if (
            len(usable) >= state.nodes.least
            and end.kind is not Kind.NOT_STARTED
            and not state.nodes.others_fit
        ):
            # Nodes that were left out before are better than none.
            return Decision(_action(state.nodes.in_use, usable), usable)
    return Decision(Action.REQUEUE, exclude=_left_out(state, here=False))


def suspects(policy: Policy, history: History) -> dict[str, str]:
    """Nodes that are to be left out after what happened on them, and why; without those that are already."""
    found = {}
    for (host, kind), count in history.num_on().items():
        enough = policy[kind].exclude
        if enough and count >= enough and host not in history.excluded:
            found[host] = f"{kind}, {count} times" if count > 1 else str(kind)
    return found


def _left_out(state: State, *, here: bool) -> dict[str, str]:
    """Nodes to be left out from now on, as far as that leaves enough of them, here or elsewhere."""
    found = suspects(state.policy, state.history)
    enough_here = len(state.nodes.usable(state.history.excluded.union(found))) >= state.nodes.least
    return found if state.nodes.others_fit or (here and enough_here) else {}


def _action(before: tuple[str, ...], hosts: tuple[str, ...]) -> Action:
    if len(hosts) < len(before):
        return Action.SHRINK
    return Action.RESTART if hosts == before else Action.REPLACE


def _spent(state: State, kind: Kind) -> str | None:
    """Why there is no other start, where the budget of this kind is spent."""
    policy, history = state.policy, state.history
    row = policy[kind]
    if kind.is_stop:
        count = sum(past is kind for past in history.stops)
        if count < (policy.max_failures if row.retries is None else row.retries):
            return None
        return (
            f"{count} stops in a row ({kind}), each soon after the start and without a new checkpoint "
            f"(restart.{kind}.retries)"
        )
    if kind is Kind.OUT_OF_TIME and row.retries == 0:
        return "the ranks did not save and leave before the time limit; submit with a longer --signal-lead"
    alike = history.num_alike()
    if row.repeats is not None and alike > row.repeats:
        return f"the same {kind} failure {alike} times in a row, with no new checkpoint between"
    if row.retries is None:
        sharing = {other for other, its in policy.rows.items() if its.retries is None}
        most, name = policy.max_failures - 1, "--max-failures"
    else:
        sharing, most, name = {kind}, row.retries, f"restart.{kind}.retries"
    failures = sum(past.kind in sharing for past in history.failures)
    crashes = sum(past in sharing for past in history.crashes)
    if failures > most:
        return f"{failures} failures in a row with no new checkpoint ({name})" if failures > 1 else ""
    if crashes >= CRASHES_PER_FAILURE * (most + 1):
        return f"{crashes} failures with no checkpoint of which the step is known ({name})"
    return None
