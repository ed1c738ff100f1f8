"""Grace time of the ranks for saving after each signal, if known."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hpctrain.errors import SchedulerError
from hpctrain.rundir import REQUEUE_GRACE_KEY, STOP_GRACE_VARIABLE
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import query_config
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.site_facts import parse_partition
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.workers.attempt_monitor import CANCEL_GRACE_S, STOP_GRACE_S

log = logging.getLogger(__name__)


def stop_grace_env(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with the grace times of the ranks: `SIGTERM=30,SIGUSR2=120`.

    Empty if the user sets the variable. A requeue at the user's request has no limit under Slurm; without
    Slurm, the supervisor sets a limit.
    """
    if STOP_GRACE_VARIABLE in spec.env:
        return {}
    in_slurm = spec.backend == "slurm"
    known = {
        "SIGTERM": _slurm_term_s(environ) if in_slurm else CANCEL_GRACE_S,
        "SIGUSR2": float(spec.stop_before_limit_s),
        REQUEUE_GRACE_KEY: None if in_slurm else STOP_GRACE_S,
    }
    return {STOP_GRACE_VARIABLE: ",".join(f"{name}={s:g}" for name, s in known.items() if s is not None)}


def _slurm_term_s(environ: Mapping[str, str]) -> float | None:
    """Seconds from SIGTERM to SIGKILL: the partition's GraceTime, else KillWait. None if unknown.

    If jobs are preempted by QOS, the QOS has the GraceTime, and only accounting can report it.
    """
    outer = strip_job_env(environ)
    try:
        config = query_config(outer)
        if config.preempt_type == "qos":
            return None
        partition = environ.get("SLURM_JOB_PARTITION", "")
        answer = run_slurm(["scontrol", "--oneliner", "show", "partition", partition], outer)
    except SchedulerError as error:
        log.warning("cannot determine the grace time, so Slurm may kill ranks while they save: %s", error)
        return None
    return parse_partition(answer).grace_time_s or config.kill_wait_s
