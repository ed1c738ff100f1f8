"""What the ranks are told of the time that a signal leaves them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.commands import environment

from hpctrain.rundir import STOP_GRACE_VARIABLE
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.stop_grace import stop_grace_env


def spec(**given: Any) -> JobSpec:
    facts = {"script": "/x.py", "name": "x", "run_id": "x", "run_dir": "/x", "python": "python"}
    return JobSpec(**facts, workdir="/", nodes=1, **{"backend": "slurm", **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(("partition", "term_s"), [("preemptible", 30), ("urgent", 5)])
def test_a_preemption_leaves_what_slurm_says_the_partition_leaves_or_else_killwait(slurm, partition, term_s):
    environ = environment({**slurm.env, "SLURM_JOB_PARTITION": partition})
    said = stop_grace_env(spec(time_limit_s=600.0, stop_before_limit_s=90), environ)
    assert said == {STOP_GRACE_VARIABLE: f"SIGTERM={term_s},SIGUSR2=90"}


def test_without_an_answer_of_slurm_only_the_lead_is_known():
    environ = environment({"SLURM_CONF": "/nowhere/slurm.conf", "SLURM_JOB_PARTITION": "x"})
    assert stop_grace_env(spec(), environ) == {STOP_GRACE_VARIABLE: "SIGUSR2=120"}


def test_without_slurm_the_supervisor_gives_a_minute_and_the_user_overrules():
    assert stop_grace_env(spec(backend="local"), {}) == {
        STOP_GRACE_VARIABLE: "SIGTERM=60,SIGUSR2=120,requeue=300"
    }
    assert stop_grace_env(spec(env={STOP_GRACE_VARIABLE: "SIGTERM=5"}), {}) == {}
