"""Rendezvous of real job steps, several at the same time."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for

#: Joins, and prints the steps of all peers that connect to the agreed port.
RANK = """
import json, os, socket, sys
from hpctrain import detect
from hpctrain.cluster.rendezvous import rendezvous
ranks = detect(os.environ)
meeting = rendezvous(ranks, os.environ)
mine = os.environ["SLURM_JOB_ID"] + "." + os.environ["SLURM_STEP_ID"]
if ranks.is_main:
    heard = [mine]
    while len(heard) < ranks.world_size:
        connection, _ = meeting.reserved_port.listener.accept()
        line = connection.makefile().readline().strip()
        # As torch's store, do without ranks of other steps that look for their own at this port, too.
        if not line.startswith("{"):
            heard.append(line)
else:
    heard = None
    socket.create_connection((meeting.address, meeting.port), timeout=60).sendall(mine.encode() + b"\\n")
print(json.dumps({"step": mine, "rank": ranks.rank, "port": meeting.port, "heard": heard}), flush=True)
"""


@pytest.fixture
def rank_command(tmp_path) -> str:
    """The shell command that runs `RANK`."""
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return f"{sys.executable} {path}"


def assert_each_step_joined_itself(text: str, num_steps: int, num_ranks: int) -> None:
    steps = defaultdict(list)
    for line in text.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            steps[record["step"]].append(record)
    assert len(steps) == num_steps, text
    for step, records in steps.items():
        assert sorted(record["rank"] for record in records) == list(range(num_ranks))
        assert len({record["port"] for record in records}) == 1
        (heard,) = [record["heard"] for record in records if record["heard"]]
        assert heard == [step] * num_ranks
    # On this machine all nodes share the ports of one host.
    assert len({records[0]["port"] for records in steps.values()}) == num_steps


def read_logs(path: Path) -> str:
    return "".join(file.read_text() for file in path.glob("*.log"))


def test_step_in_salloc_joins(slurm, rank_command, tmp_path):
    result = run_command(
        ["salloc", "-Q", "-N2", "-n4", "sh", "-c", f"srun {rank_command}"], slurm.env, cwd=tmp_path
    )
    assert_each_step_joined_itself(result.stdout, 1, 4)


def test_concurrent_steps_of_one_job_do_not_mix(slurm, rank_command, tmp_path):
    steps = " & ".join([f"srun --overlap -N2 -n4 {rank_command}"] * 3)
    result = run_command(
        ["salloc", "-Q", "-N2", "-n4", "sh", "-c", f"{steps} & wait"], slurm.env, cwd=tmp_path
    )
    assert_each_step_joined_itself(result.stdout, 3, 4)


def test_concurrent_array_tasks_do_not_mix(slurm, rank_command, tmp_path):
    command = ["sbatch", "--wait", "--array=0-3", "-N2", "-n2", f"--output={tmp_path}/%A_%a.log"]
    run_command([*command, f"--wrap=srun {rank_command}"], slurm.env, cwd=tmp_path)
    wait_for(lambda: read_logs(tmp_path).count("port") == 8, 30, "the output of all tasks")
    assert_each_step_joined_itself(read_logs(tmp_path), 4, 2)


def test_task_that_fails_early_is_reported_missing_by_the_others(slurm, rank_command, tmp_path):
    command = f"test $SLURM_PROCID = 2 && exit 3; exec {rank_command.replace('rank.py', 'short.py')}"
    (tmp_path / "short.py").write_text(RANK.replace("os.environ)\nmine", "os.environ, timeout_s=3)\nmine"))
    result = run_command(
        ["srun", "-N2", "-n4", "sh", "-c", command], slurm.env, cwd=tmp_path, check=False, timeout=40
    )
    assert result.returncode != 0
    assert result.stderr.count("2 of 3 peers have connected to ") == 3
    assert result.stderr.count("missing: rank 2") == 3
