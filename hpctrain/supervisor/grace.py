"""How long each signal leaves the ranks to save, as far as that is known."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from hpctrain.errors import SchedulerError
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.site import words
from hpctrain.jobs.site.read import parse_config
from hpctrain.jobs.slurm_command import run_slurm
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import GRACE_OF_REQUEUE, STOP_GRACE_VARIABLE
from hpctrain.supervisor.attempt import CANCEL_GRACE_S, STOP_GRACE_S

log = logging.getLogger(__name__)


def grace_variables(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks are told of it, unless the user tells them: `SIGTERM=30,SIGUSR2=120`.

    A requeue that the user asked for has no limit under Slurm; without it, the supervisor sets one.
    """
    if STOP_GRACE_VARIABLE in spec.env:
        return {}
    in_slurm = spec.backend == "slurm"
    known = {
        "SIGTERM": _slurm_term_s(environ) if in_slurm else CANCEL_GRACE_S,
        "SIGUSR2": float(spec.signal_lead_s),
        GRACE_OF_REQUEUE: None if in_slurm else STOP_GRACE_S,
    }
    return {STOP_GRACE_VARIABLE: ",".join(f"{name}={s:g}" for name, s in known.items() if s is not None)}


def _slurm_term_s(environ: Mapping[str, str]) -> float | None:
    """Seconds from SIGTERM to the end: a preemption's GraceTime, else KillWait. None where nobody knows.

    Where jobs are preempted by their QOS, that has the GraceTime, and it takes accounting to ask for it.
    """
    outer = outer_environment(environ)
    try:
        site = parse_config(run_slurm(["scontrol", "show", "config"], outer))
        if site.preempt_type == "qos":
            return None
        partition = environ.get("SLURM_JOB_PARTITION", "")
        answer = run_slurm(["scontrol", "--oneliner", "show", "partition", partition], outer)
    except SchedulerError as error:
        log.warning("%s How long the ranks may save is not known to them.", error)
        return None
    return float(words.number(words.pairs(answer).get("GraceTime", "")) or site.kill_wait_s)
