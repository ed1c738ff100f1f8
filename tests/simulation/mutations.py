"""Bugs to plant: each must be found by the simulation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hpctrain.checkpoint.io.retention import Retention
from hpctrain.errors import SchedulerError
from hpctrain.records import lease, successor
from hpctrain.supervisor import acquire_run, requeuer, supervise
from hpctrain.supervisor.job_control.slurm_nodes import SlurmNodes
from hpctrain.supervisor.policy import job_intent

Patch = tuple[object, str, Any]


def _drop_newest(self: Retention, scores: Any, *_: object) -> set[int]:
    return set(sorted(scores)[-1 - self.last : -1])


def _submit_again(run: Any, spec: Any, job_id: str, environ: Any, changes: Any) -> str:
    """Submit after a lost answer without searching the queue."""
    for _ in range(20):
        try:
            return successor._submit(run, spec, job_id, environ, changes)
        except SchedulerError:
            successor.system.sleep(1.0)
    raise SchedulerError("no answer")


def _ignore_end(state: job_intent.OwnershipState) -> job_intent.OwnershipDecision:
    return job_intent.decide_ownership(replace(state, ended=None, cancelled=False))


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
        (successor, "_submit_once", _submit_again),
    ],
    "restart an ended run": [(acquire_run, "decide_ownership", _ignore_end)],
}
