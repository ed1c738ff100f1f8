"""Restart policy by kind of end: a table with rows that users may change.

docs/restart-policy.md shows the same table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from hpctrain.errors import SpecError
from hpctrain.text import is_count

#: Early stops without a new checkpoint; restarts at the time limit, after attempts of the maximum length.
_STOPS, _TIME_LIMITS = 10, 2
#: Attempts with more memory or smaller micro-batches; restarts after faults that each exclude a node.
_MEMORY, _MACHINES = 3, 10


class EndKind(StrEnum):
    DONE = "done"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time-limit"
    REQUESTED = "requested"
    PYTHON = "python"
    USER_ERROR = "user-error"
    UNFINISHED = "unfinished"
    OOM = "oom"
    GPU_OOM = "gpu-oom"
    KILLED = "killed"
    SIGNAL = "signal"
    COMMUNICATION = "communication"
    UNAUTHENTICATED = "unauthenticated"
    GPU = "gpu"
    CORRUPTION = "corruption"
    HANG = "hang"
    STRAGGLER = "straggler"
    NODE_LOST = "node-lost"
    NODE_DRAIN = "node-drain"
    NODE_CHECK = "node-check"
    NOT_STARTED = "not-started"
    DISK_FULL = "disk-full"
    OUT_OF_TIME = "out-of-time"

    @property
    def is_stop(self) -> bool:
        return self.releases_nodes or self is EndKind.NODE_DRAIN

    @property
    def releases_nodes(self) -> bool:
        """True if the ranks exited because the job must release its nodes."""
        return self in (EndKind.PREEMPTED, EndKind.TIME_LIMIT, EndKind.REQUESTED)


#: Actions of the policy, as in docs/restart-policy.md.
RESTART_ACTIONS = {
    "restart": "starts all ranks again in the same allocation, if enough nodes remain",
    "requeue": "releases the allocation, and continues the run in another allocation",
    "end": "marks the run as failed",
}


class RestartRule(Struct, frozen=True):
    """Limits for a kind of end. All limits count ends without a new checkpoint in between."""

    retries: int | None = None
    """Maximum number of restarts; None counts them toward `--max-failures`, which all such kinds share."""
    repeats: int | None = None
    """Maximum number of restarts after failures with an identical message; None means `retries`."""
    exclude: int = 0
    """Number of failures on a node after which the node is excluded; 0 means never."""


class EndKindInfo(NamedTuple):
    cause: str
    action: str
    """Action of the policy; `–` if ends of this kind are only counted."""
    rule: RestartRule | None = None
    advice: str = ""
    """Advice for users if the run ended because of this kind."""
    may_follow_stop: bool = False
    """True if a failure of this kind after a stop request is part of the stop: ranks that stop at different
    times lose each other."""
    checks_nodes: bool = False
    """True if the nodes are checked before the next attempt, if `node_check` is `auto`."""


END_KINDS: Mapping[EndKind, EndKindInfo] = {
    EndKind.DONE: EndKindInfo("all ranks completed", "–"),
    EndKind.PREEMPTED: EndKindInfo(
        "Slurm needs the nodes for another job", "requeue", RestartRule(retries=_STOPS)
    ),
    EndKind.TIME_LIMIT: EndKindInfo(
        "the job is close to its time limit",
        "requeue",
        RestartRule(retries=_TIME_LIMITS),
        "submit with a longer --time, or with a longer --stop-before-limit if there was not enough time for "
        "the last save",
    ),
    EndKind.REQUESTED: EndKindInfo("you ran `hpctrain requeue`", "requeue", RestartRule(retries=_STOPS)),
    EndKind.PYTHON: EndKindInfo(
        "an exception in the script, or a nonzero exit code",
        "restart",
        RestartRule(repeats=1),
        "`hpctrain logs RUN` shows the traceback; fix the script, then submit again with the same --run-dir",
    ),
    EndKind.USER_ERROR: EndKindInfo(
        "an exception in the first step, before any checkpoint",
        "end",
        RestartRule(retries=0),
        "`hpctrain logs RUN` shows the traceback; fix the script, then submit again",
    ),
    EndKind.UNFINISHED: EndKindInfo(
        "a rank exited with code 0 before training was complete",
        "end",
        RestartRule(retries=0),
        "look for `sys.exit`, `return` or a caught exception in the script",
        may_follow_stop=True,
    ),
    EndKind.OOM: EndKindInfo(
        "the job ran out of memory",
        "requeue",
        RestartRule(retries=_MEMORY),
        "submit with fewer data workers or ranks per node, with a larger --mem, or to nodes with more memory",
    ),
    EndKind.GPU_OOM: EndKindInfo(
        "a GPU ran out of memory",
        "restart",
        RestartRule(retries=_MEMORY),
        "use smaller batches, GPUs with more memory or, with the Trainer, a smaller micro_batch_size, "
        "recompute=True or a sharded strategy",
    ),
    EndKind.KILLED: EndKindInfo(
        "a rank or a data worker was killed with SIGKILL, or a rank failed without reporting a cause",
        "restart",
        RestartRule(exclude=2),
        "check whether the kernel log of the node reports a lack of memory",
        may_follow_stop=True,
    ),
    EndKind.SIGNAL: EndKindInfo(
        "a rank was killed by another signal, such as SIGSEGV",
        "restart",
        RestartRule(exclude=2),
        "`hpctrain logs RUN` shows the Python stack; look for a faulty C extension or driver",
        may_follow_stop=True,
    ),
    EndKind.COMMUNICATION: EndKindInfo(
        "communication between ranks failed, and no rank reported another cause",
        "restart",
        RestartRule(exclude=2),
        "`hpctrain doctor` checks the network; --env NCCL_DEBUG=INFO logs the cause",
        may_follow_stop=True,
        checks_nodes=True,
    ),
    EndKind.UNAUTHENTICATED: EndKindInfo(
        "a program from outside the run changed the state of torchrun's agents",
        "restart",
        RestartRule(exclude=2),
        "ask an administrator which program scans ports on the nodes",
    ),
    EndKind.GPU: EndKindInfo(
        "a GPU fault, such as an Xid error, an ECC error or a missing device",
        "restart",
        RestartRule(retries=_MACHINES, exclude=1),
        "report the node to an administrator, and exclude it with --exclude",
        may_follow_stop=True,
        checks_nodes=True,
    ),
    EndKind.CORRUPTION: EndKindInfo(
        "a rank computed wrong results, although its hardware reported no error",
        "restart",
        RestartRule(retries=_MACHINES, exclude=1),
        "report the device to an administrator, and exclude its node with --exclude",
    ),
    EndKind.HANG: EndKindInfo(
        "no rank made progress",
        "restart",
        RestartRule(exclude=2),
        "`hpctrain logs RUN` shows the stacks of the ranks; if the script is only slow, use a longer "
        "--hang-timeout",
        checks_nodes=True,
    ),
    EndKind.STRAGGLER: EndKindInfo(
        "a node repeatedly slowed down the others", "–", RestartRule(retries=_MACHINES, exclude=2)
    ),
    EndKind.NODE_LOST: EndKindInfo(
        "a node stopped responding",
        "restart",
        RestartRule(retries=_MACHINES),
        "use --spare-nodes, so that the run does not have to wait for another allocation",
    ),
    EndKind.NODE_DRAIN: EndKindInfo(
        "a node is drained, or the GPU driver of a node reports a fault",
        "restart",
        RestartRule(retries=_STOPS),
    ),
    EndKind.NODE_CHECK: EndKindInfo(
        "a node failed the node check",
        "restart",
        RestartRule(retries=_MACHINES, exclude=1),
        "report the node to an administrator",
    ),
    EndKind.NOT_STARTED: EndKindInfo(
        "Slurm did not start the ranks",
        "requeue",
        RestartRule(),
        "see the error message of srun in the job log, slurm.log",
    ),
    EndKind.DISK_FULL: EndKindInfo(
        "the disk has no space for the checkpoint of the last step",
        "end",
        RestartRule(retries=0),
        "free space or request a larger quota, then use `hpctrain resume RUN`",
    ),
    EndKind.OUT_OF_TIME: EndKindInfo(
        "the ranks did not exit before the time limit",
        "end",
        RestartRule(retries=0),
        "submit with a longer --stop-before-limit",
    ),
}
DEFAULT_RULES: Mapping[EndKind, RestartRule] = {
    kind: info.rule for kind, info in END_KINDS.items() if info.rule is not None
}

_FIELDS = RestartRule.__struct_fields__
_FORM = f"Use KIND.FIELD=NUMBER, as in oom.retries=0. FIELD is one of {', '.join(_FIELDS)}."


class RestartPolicy(Struct, frozen=True):
    rules: Mapping[EndKind, RestartRule]
    max_failures: int
    """Consecutive failures without a new checkpoint that end the run, for all kinds that share the limit."""

    @classmethod
    def with_changes(cls, changes: Mapping[str, Mapping[str, int]], max_failures: int) -> RestartPolicy:
        """Return the default policy with the user's changes."""
        rules = dict(DEFAULT_RULES)
        for name, values in changes.items():
            kind = _kind(name)
            for field, value in values.items():
                _check(name, field, value)
            rules[kind] = replace(rules[kind], **values)
        return cls(rules, max_failures)

    def without_exclusions(self) -> RestartPolicy:
        """Return the policy without node exclusions, for a run on a single machine."""
        return replace(self, rules={kind: replace(rule, exclude=0) for kind, rule in self.rules.items()})

    def __getitem__(self, kind: EndKind) -> RestartRule:
        return self.rules[kind]


def parse_rule_changes(texts: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return the changes for `RestartPolicy.with_changes`, which checks their names."""
    changes: dict[str, dict[str, int]] = {}
    for key, text in texts.items():
        kind, _, field = key.partition(".")
        if not is_count(text):
            raise SpecError(
                f"--restart-policy {key} is {text!r}, but must be an integer of at least 0. {_FORM}"
            )
        changes.setdefault(kind, {})[field] = int(text)
    return changes


def _kind(name: str) -> EndKind:
    if name in set(DEFAULT_RULES):
        return EndKind(name)
    raise SpecError(
        f"Unknown kind {name!r} (--restart-policy). Valid kinds: {', '.join(DEFAULT_RULES)}. {_FORM}"
    )


def _check(kind: str, field: str, value: object) -> None:
    if field not in _FIELDS:
        problem = f"has no field {field!r}" if field else "is missing a field"
        raise SpecError(f"--restart-policy {kind} {problem}. {_FORM}")
    if type(value) is not int or value < 0:
        raise SpecError(f"--restart-policy {kind}.{field} is {value!r}, but must be 0 or more.")
