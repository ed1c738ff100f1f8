"""The grace periods that ranks receive from the supervisor."""

import pytest
from helpers.commands import environment
from helpers.run_histories import make_spec

from hpctrain.rundir import STOP_GRACE_VARIABLE
from hpctrain.supervisor.batch_main import stop_grace_env


@pytest.mark.parametrize(("partition", "term_s"), [("preemptible", 30), ("urgent", 5)])
def test_preemption_grace_is_that_of_the_partition_or_killwait(slurm, partition, term_s):
    environ = environment({**slurm.env, "SLURM_JOB_PARTITION": partition})
    variables = stop_grace_env(make_spec(time_limit_s=600.0, stop_before_limit_s=90), environ)
    assert variables == {STOP_GRACE_VARIABLE: f"SIGTERM={term_s},SIGUSR2=90"}


def test_only_the_lead_is_known_without_an_answer_from_slurm():
    environ = environment({"SLURM_CONF": "/nowhere/slurm.conf", "SLURM_JOB_PARTITION": "x"})
    assert stop_grace_env(make_spec(), environ) == {STOP_GRACE_VARIABLE: "SIGUSR2=120"}


def test_local_grace_is_a_minute_and_can_be_overridden():
    assert stop_grace_env(make_spec(backend="local"), {}) == {
        STOP_GRACE_VARIABLE: "SIGTERM=60,SIGUSR2=120,requeue=300"
    }
    assert stop_grace_env(make_spec(env={STOP_GRACE_VARIABLE: "SIGTERM=5"}), {}) == {}
