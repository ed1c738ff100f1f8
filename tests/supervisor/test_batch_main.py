"""The grace periods that ranks receive from the supervisor."""

import pytest
from helpers.commands import environment
from helpers.run_histories import make_spec

from hpctrain.rundir import STOP_GRACE_VARIABLE
from hpctrain.slurm import site_facts
from hpctrain.slurm.config import SlurmConfig
from hpctrain.supervisor import batch_main
from hpctrain.supervisor.batch_main import stop_grace_env


@pytest.mark.parametrize(("partition", "term_s"), [("preemptible", 30), ("urgent", 5)])
def test_preemption_grace_is_that_of_the_partition_or_killwait(slurm, partition, term_s):
    environ = environment({**slurm.env, "SLURM_JOB_PARTITION": partition})
    variables = stop_grace_env(make_spec(time_limit_s=600.0, stop_before_limit_s=90), environ)
    assert variables == {STOP_GRACE_VARIABLE: f"SIGTERM={term_s},SIGUSR2=90,cancel=5"}


@pytest.mark.parametrize(
    ("answer", "grace"), [("00:02:00\n", "SIGTERM=120,"), ("00:00:00\n", "SIGTERM=30,"), ("", "")]
)
def test_preemption_grace_is_that_of_the_qos_if_it_decides(monkeypatch, answer, grace):
    monkeypatch.setattr(
        batch_main, "query_config", lambda _: SlurmConfig(preempt_type="qos", kill_wait_s=30.0)
    )
    monkeypatch.setattr(site_facts, "run_slurm", lambda *_, **__: answer)
    variables = stop_grace_env(make_spec(), {"SLURM_JOB_QOS": "low"})
    assert variables == {STOP_GRACE_VARIABLE: f"{grace}SIGUSR2=120,cancel=30"}


def test_only_the_lead_is_known_without_an_answer_from_slurm():
    environ = environment({"SLURM_CONF": "/nowhere/slurm.conf", "SLURM_JOB_PARTITION": "x"})
    assert stop_grace_env(make_spec(), environ) == {STOP_GRACE_VARIABLE: "SIGUSR2=120"}


def test_local_grace_is_a_minute_and_can_be_overridden():
    assert stop_grace_env(make_spec(backend="local"), {}) == {
        STOP_GRACE_VARIABLE: "SIGTERM=60,SIGUSR2=120,requeue=300"
    }
    assert stop_grace_env(make_spec(env={STOP_GRACE_VARIABLE: "SIGTERM=5"}), {}) == {}
