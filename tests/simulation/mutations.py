"""Bugs to plant: each must be found by the simulation."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hpctrain.checkpoint.io.retention import Retention
from hpctrain.errors import SchedulerError
from hpctrain.records import lease, submit_successor
from hpctrain.supervisor import acquire_run, requeuer, supervise
from hpctrain.supervisor.job_control import SlurmNodes
from hpctrain.supervisor.monitors.scale_up_monitor import ScaleUpMonitor
from hpctrain.supervisor.notifications import Notifier
from hpctrain.supervisor.policy import job_intent
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.workers.rank_monitor import StopAgreement
from hpctrain.supervisor.workers.worker_group import WorkerGroup

Patch = tuple[object, str, Any]


def _edit(owner: object, name: str, old: str, new: str) -> Patch:
    """Return the patch that replaces `old` by `new` in the source of a function."""
    function: Callable[..., object] = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} does not contain {old!r} once"
    found: dict[str, Any] = {}
    module = inspect.getmodule(function)
    exec(source.replace(old, new), vars(module), found)
    return owner, name, found[name]


def _drop_newest(self: Retention, scores: Any, *_: object) -> set[int]:
    return set(sorted(scores)[-1 - self.last : -1])


def _submit_again(run: Any, spec: Any, job_id: str, environ: Any, changes: Any) -> str:
    for _ in range(20):
        try:
            return submit_successor._submit(run, spec, job_id, environ, changes)
        except SchedulerError:
            submit_successor.system.sleep(1.0)
    raise SchedulerError("no answer")


def _ignore_claim(state: job_intent.OwnershipState) -> job_intent.OwnershipDecision:
    return job_intent.decide_ownership(replace(state, claimed_by=state.job_id, newest=state.job_id))


#: Attributes to replace, by bug.
MUTATIONS: dict[str, list[Patch]] = {
    "skip the lease check": [(lease, "is_lease_alive", lambda *_: False)],
    "requeue after COMPLETED": [(requeuer, "read_run_record", lambda _: SimpleNamespace(finished=None))],
    "delete the newest checkpoint": [(Retention, "steps_to_keep", _drop_newest)],
    "forget to kill orphans": [
        (SlurmNodes, "kill_steps", lambda _: None),
        (supervise, "kill_orphans", lambda *_: []),
    ],
    "claim twice": [
        (acquire_run, "decide_ownership", _ignore_claim),
        (submit_successor, "_submit_once", _submit_again),
    ],
    "restart an ended run": [(acquire_run, "recorded_end", lambda _: None)],
    "a replaced holder keeps its lease": [
        _edit(lease.Lease, "_renew_once", "newest > self._number and", "newest > self._number + 1 and")
    ],
    "a counted step is progress": [
        _edit(History, "from_events", "(event.checkpoint is not None or event.is_loaded is True)", "True")
    ],
    "a spare in use remains a spare": [
        _edit(
            supervise.Supervisor,
            "_change_nodes",
            "if host not in hosts and host not in released",
            "if host not in released",
        )
    ],
    "unusable standby workers are not ended": [
        _edit(WorkerGroup, "_start_from_standby", "standby.close()", "pass")
    ],
    "the lease is not renewed": [
        _edit(lease.Lease, "_renew_once", "self._write_holder(self._number, self._me)", "pass")
    ],
    "a requeue is tried only once": [
        _edit(requeuer.Requeuer, "relocate", "or not moved.is_transient", "or moved")
    ],
    "failures are not counted": [_edit(History, "_add_failure", "self.failures.append(failure)", "pass")],
    "ranks stop at the earliest step": [_edit(StopAgreement, "_common_step", "max(steps)", "min(steps)")],
    "a request to cancel is ignored": [
        _edit(requeuer.Requeuer, "intent", "self.run.cancel_request.exists()", "False")
    ],
    "all nodes count as free": [
        _edit(ScaleUpMonitor, "check", "self.num_nodes + nodes.num_free(excluded)", "self.spec.nodes")
    ],
    "the end of a run is not notified": [
        _edit(
            Notifier,
            "run",
            "    self._check_with_retries()\n    self._check_with_retries()",
            "    self._check_with_retries()",
        )
    ],
}

#: A seed and faults that show a planted bug, for a fast test.
PLANTED_SEEDS: dict[str, tuple[int, str]] = {
    "a requeue is tried only once": (1, "requeue@45 slurm-away@40:60"),
    "a replaced holder keeps its lease": (36, "steal-lease@27.5:64.7"),
    "a counted step is progress": (0, "start-over@0:5"),
    "a spare in use remains a spare": (3146, "gpu-fault@33.1:1 kill-node@43.1:2"),
    "unusable standby workers are not ended": (265, "kill-node@7.2 kill-node@251:3"),
}
