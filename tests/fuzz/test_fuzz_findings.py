"""Texts that parsers once failed on."""

import json
import math
from unittest.mock import patch

import pytest
from fuzzing import FOLDER, encode

from hpctrain.cluster.env_variables import read_hosts
from hpctrain.errors import EnvironmentMismatch, SchedulerError
from hpctrain.record_types import LeaseHolder
from hpctrain.records.lease import newest_lease
from hpctrain.records.submit_successor import claim_successor
from hpctrain.rundir import RunDir
from hpctrain.slurm import command, job_requests
from hpctrain.slurm.command import is_answer_lost, list_rank_steps
from hpctrain.slurm.job_requests import submit_job
from hpctrain.slurm.srun_step import parse_task_report
from hpctrain.supervisor.failures.root_cause import read_failures

#: json rejects such texts with a RecursionError.
NESTED = "[" * 100_000
RUN = RunDir(FOLDER / "findings")


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(text))


def test_step_numbers_that_are_not_ascii_are_ignored():
    with patch.object(command, "run_slurm", return_value="17.² hpctrain-ranks-0\n17.1 hpctrain-ranks-0\n"):
        assert list_rank_steps(["17"], {}) == ["17.1"]


@pytest.mark.parametrize("answer", ["", "sbatch: lua: hello\n", ";north\n"])
def test_submission_without_a_job_id_is_an_unconfirmed_one(answer):
    with (
        patch.object(job_requests, "run_slurm", return_value=answer),
        pytest.raises(SchedulerError, match="printed no job id") as raised,
    ):
        submit_job([], {})
    assert is_answer_lost(str(raised.value))


@pytest.mark.parametrize("tasks", ["3-1", "1-", "-", "٣"])
def test_line_of_a_program_that_resembles_a_task_report_is_ignored(tasks):
    assert parse_task_report(f"srun: error: n1: tasks {tasks}: Killed") == []


def test_host_list_without_hosts_is_refused():
    with pytest.raises(EnvironmentMismatch, match="SLURM_STEP_NODELIST is ',', which contains no host"):
        read_hosts({"SLURM_STEP_NODELIST": ","}, "SLURM_STEP_NODELIST")


@pytest.mark.parametrize("content", [NESTED, '{"job_id": "17", "start": "0"}', '{"job_id": 17}', "null"])
def test_damaged_lease_has_an_unknown_holder(content):
    write(RUN.lease(0), content)
    state = newest_lease(RUN)
    assert state is not None
    assert state.holder == LeaseHolder("unknown (unreadable lease)")


def test_damaged_claim_belongs_to_another_job():
    write(RUN.successor_claim("17"), "1\udcff8")
    assert claim_successor(RUN, "18", "17") != "18"


@pytest.mark.parametrize(
    "damage", [{"rank": "0"}, {"corruption": {"suspects": [[math.inf, "x"]], "verified_step": 1}}]
)
def test_damaged_failure_file_is_skipped(damage, caplog):
    whole = {"rank": 0, "host": "n1", "kind": "exit", "error": "e", "message": "m", "log": "l"}
    whole |= {"order": 1, "time": 1.0}
    write(RUN.failure(0, 0), json.dumps(whole))
    assert [failure.rank for failure in read_failures(RUN, 0)] == [0]
    write(RUN.failure(0, 0), json.dumps(whole | damage))
    assert list(read_failures(RUN, 0)) == []
    assert f"cannot read {RUN.failure(0, 0)}" in caplog.text
