"""Decide the next action after an attempt, as a pure function of the history of the run.

The rules are the rows of `hpctrain.jobspec.restart_policy` and of docs/restart-policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hpctrain.cluster import compress_hostlist
from hpctrain.jobspec.restart_policy import END_KINDS, EndKind, RestartPolicy
from hpctrain.supervisor.policy.history import History, shows_no_progress
from hpctrain.supervisor.policy.job_intent import JobIntent
from hpctrain.text import pluralize

#: Limit on crashes without a known step, as a multiple of the allowed consecutive failures. New files do not
#: prove progress: a script that starts over writes the same files again.
CRASHES_PER_FAILURE = 10


@dataclass(frozen=True)
class Allocation:
    in_use: tuple[str, ...] = ("n1",)
    spare: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Nodes that can no longer run processes, or are about to be taken out of service, with the reason."""
    min_nodes: int = 1
    can_reallocate: bool = False
    """True if the scheduler can start the job without the nodes to be excluded."""

    def usable(self, excluded_hosts: frozenset[str]) -> tuple[str, ...]:
        """Return the usable nodes, at most as many as were in use; spare nodes replace lost nodes."""
        all_hosts = (*self.in_use, *self.spare)
        good = [host for host in all_hosts if host not in self.lost and host not in excluded_hosts]
        return tuple(good[: len(self.in_use)])


@dataclass(frozen=True)
class RunSituation:
    policy: RestartPolicy
    history: History = field(default_factory=History)
    """History of the run, including the failure of this attempt."""
    intent: JobIntent = JobIntent.CONTINUE
    nodes: Allocation = field(default_factory=Allocation)
    ends_at: float | None = None
    lead_s: float = 0.0
    """Seconds before `ends_at` at which the ranks receive the stop signal."""
    seconds: float = 0.0
    larger_memory: str | None = None
    """sbatch option with which the job can get more memory, such as `mem=96000`; None if there is none."""
    must_release: bool = False
    """True if the attempt failed after a request to release the nodes."""
    has_checkpoint: bool = True
    """False if no checkpoint of the run is known; its script may save some elsewhere."""


@dataclass(frozen=True)
class AttemptEnd:
    kind: EndKind
    cause: str | None = None
    micro_batch_size: int | None = None
    """Maximum size of micro-batches after a rank ran out of GPU memory; None if unknown."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Lost and draining nodes, with the reason."""


class Action(Enum):
    RESTART = "restart"
    SHRINK = "shrink"
    """Restart the workers on the remaining nodes of the allocation."""
    REPLACE = "replace"
    """Restart the workers, with spare nodes in place of others."""
    REQUEUE = "requeue"
    LEAVE = "leave"
    """Exit without recording the end of the run: the scheduler has taken over."""
    COMPLETE = "complete"
    CANCEL = "cancel"
    FAIL = "fail"


#: Reason to end the run if the next attempt would have the same memory.
_NO_MORE_MEMORY = {
    EndKind.OOM: (
        "hpctrain cannot request more memory for this job, so another attempt would also run out of memory"
    ),
    EndKind.GPU_OOM: (
        "hpctrain cannot reduce the GPU memory that this run needs, so another attempt would also run out of "
        "memory"
    ),
}
_ENDS_RUN = {Action.COMPLETE: "completed", Action.CANCEL: "cancelled", Action.FAIL: "failed"}


@dataclass(frozen=True)
class Decision:
    action: Action
    hosts: tuple[str, ...] = ()
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Nodes to exclude from now on, with the reason."""
    memory: str | None = None
    """sbatch option with the memory to request from now on, such as `mem=96000`."""
    reason: str | None = None
    """Reason to end the run, in addition to the cause of the attempt's end; or a risk of a restart."""

    def __str__(self) -> str:
        state = _ENDS_RUN.get(self.action)
        clauses = [f"mark the run as {state}" if state else f"{self.action.value} the job"]
        if self.action is Action.LEAVE:
            clauses = ["leave the job to the scheduler"]
        if self.action in (Action.RESTART, Action.SHRINK, Action.REPLACE):
            notes = {Action.SHRINK: " (fewer nodes)", Action.REPLACE: " (with replacement nodes)"}
            clauses = [f"restart the ranks on {compress_hostlist(self.hosts)}{notes.get(self.action, '')}"]
        if self.exclude:
            nodes = ", ".join(f"{host} ({reason})" for host, reason in self.exclude.items())
            clauses.append(f"exclude {nodes}")
        if self.memory:
            clauses.append(f"request --{self.memory}")
        return "; ".join([*clauses, *filter(None, [self.reason])])


def decide(situation: RunSituation, end: AttemptEnd, now: float) -> Decision:
    """Decide the next action after an attempt; `now` is on the clock of `situation.ends_at`."""
    match end.kind, situation.intent:
        case EndKind.DONE, _:
            return Decision(Action.COMPLETE)
        case _, JobIntent.CANCEL:
            return Decision(Action.CANCEL)
        case _, JobIntent.YIELD:
            return Decision(Action.LEAVE)
    gets_more = end.kind is EndKind.OOM and situation.larger_memory is not None
    changes = gets_more or end.micro_batch_size is not None or situation.history.has_saved
    if (reason := _NO_MORE_MEMORY.get(end.kind)) and not changes:
        return Decision(Action.FAIL, reason=f"{reason}; {END_KINDS[end.kind].advice}")
    if (reason := _budget_exhausted(situation, end.kind)) is not None:
        if reason and not situation.has_checkpoint:
            reason += "; if the script saves checkpoints itself, name their files with --checkpoints"
        return Decision(Action.FAIL, reason=reason)
    if end.kind is EndKind.CORRUPTION and (reason := _repeated_corruption(situation)) is not None:
        return Decision(Action.FAIL, reason=reason)
    if gets_more:
        return Decision(Action.REQUEUE, memory=situation.larger_memory)
    if end.kind.releases_nodes:
        return Decision(Action.REQUEUE, exclude=_nodes_to_exclude(situation, here=False))
    in_time = situation.ends_at is None or situation.ends_at - now > situation.lead_s
    if in_time and situation.intent is JobIntent.CONTINUE and not situation.must_release:
        nodes = situation.nodes
        # Without more memory to request, another allocation would not help after an OOM.
        requeues = END_KINDS[end.kind].action == "requeue" and end.kind is not EndKind.OOM
        exclude = _nodes_to_exclude(situation, here=True)
        hosts = nodes.usable(situation.history.excluded.union(exclude))
        if hosts and len(hosts) >= nodes.min_nodes and (not requeues or nodes.lost):
            return _continue_on(hosts, situation, end.kind, exclude)
        hosts = nodes.usable(frozenset())
        if len(hosts) >= nodes.min_nodes and not requeues and not nodes.can_reallocate:
            # Using previously excluded nodes is better than using none.
            return _continue_on(hosts, situation, end.kind, {})
    return Decision(Action.REQUEUE, exclude=_nodes_to_exclude(situation, here=False))


def _continue_on(
    hosts: tuple[str, ...], situation: RunSituation, kind: EndKind, exclude: Mapping[str, str]
) -> Decision:
    """Restart on these nodes, with a note if one of them computed wrong results."""
    before, failures, note = situation.nodes.in_use, situation.history.failures, None
    if kind is EndKind.CORRUPTION and failures and (host := failures[-1].host) in hosts:
        note = f"{host} may compute wrong results again, but the run uses it because there is no other node"
    action = Action.RESTART if hosts == before else Action.REPLACE
    return Decision(Action.SHRINK if len(hosts) < len(before) else action, hosts, exclude, reason=note)


def describe_nodes(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {reason}" for host, reason in reasons.items())


def suspect_nodes(policy: RestartPolicy, history: History) -> dict[str, str]:
    """Return nodes to exclude because of their failures, with the reason; excluded nodes are omitted."""
    return {
        host: f"{pluralize(count, 'failure')} of kind {kind}"
        for (host, kind), count in history.count_by_node().items()
        if policy[kind].exclude and count >= policy[kind].exclude and host not in history.excluded
    }


def _nodes_to_exclude(situation: RunSituation, *, here: bool) -> dict[str, str]:
    """Return nodes to exclude from now on, if enough nodes remain in the allocation or at the site."""
    suspects = suspect_nodes(situation.policy, situation.history)
    remaining = situation.nodes.usable(situation.history.excluded.union(suspects))
    enough_here = here and len(remaining) >= situation.nodes.min_nodes
    return suspects if situation.nodes.can_reallocate or enough_here else {}


def describe_vain_stops(policy: RestartPolicy, stops: Sequence[EndKind]) -> str | None:
    """Return the reason if the policy allows no start after these consecutive stops without progress."""
    if not stops:
        return None
    kind = stops[-1]
    count, retries = sum(past is kind for past in stops), policy[kind].retries
    if count <= (policy.max_failures if retries is None else retries):
        return None
    if kind is EndKind.TIME_LIMIT:
        return (
            f"{count} consecutive attempts ended at the time limit without a new checkpoint "
            f"(limit: --restart-policy {kind}.retries); {END_KINDS[kind].advice}"
        )
    return (
        f"{count} consecutive attempts were stopped soon after their start, without a new "
        f"checkpoint (limit: --restart-policy {kind}.retries)"
    )


def _repeated_corruption(situation: RunSituation) -> str | None:
    """Return the reason to end the run if a device computed wrong results again, and cannot be avoided."""
    devices = situation.history.faulty_devices
    count = devices.count(devices[-1]) if devices and devices[-1] is not None else 0
    if count < 2 or situation.history.failures[-1].host in _nodes_to_exclude(situation, here=True):
        return None
    return (
        f"{devices[-1]} computed wrong results {count} times, and its node cannot be excluded. Submit the "
        "run to other nodes, and have this device checked"
    )


def _budget_exhausted(situation: RunSituation, kind: EndKind) -> str | None:
    """Return the reason if the budget of this kind is exhausted; None if another attempt is allowed."""
    policy, history = situation.policy, situation.history
    rule = policy[kind]
    if kind.is_stop:
        if not shows_no_progress(kind, situation.seconds, agreed=history.agreed_to_stop):
            return None
        return describe_vain_stops(policy, [*history.stops, kind])
    if kind is EndKind.OUT_OF_TIME and rule.retries == 0:
        return f"the ranks did not save and exit before the time limit; {END_KINDS[kind].advice}"
    repeats = history.consecutive_identical()
    if rule.repeats is not None and repeats > rule.repeats:
        label = "failure" if kind is EndKind.PYTHON else f"{kind} failure"
        return f"the same {label} occurred {repeats} times in a row without a new checkpoint"
    if rule.retries is None:
        sharing = {kind for kind, rule in policy.rules.items() if rule.retries is None}
        limit, option = policy.max_failures - 1, "--max-failures"
    else:
        sharing, limit, option = {kind}, rule.retries, f"--restart-policy {kind}.retries"
    failures = sum(past.kind in sharing for past in history.failures)
    crashes = sum(past in sharing for past in history.crashes)
    if failures > limit:
        reason = f"{failures} consecutive failures without a new checkpoint (limit: {option})"
        return reason if failures > 1 else ""
    if crashes >= (crash_limit := CRASHES_PER_FAILURE * (limit + 1)):
        return f"{crashes} consecutive failures without known progress (limit: {crash_limit}, from {option})"
    return None
