"""Ranks of real job steps find their own peers, however many steps there are at the same time."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for

#: Meets, and tells in one line whom: the numbers that all ranks drew, by way of the port they agreed on.
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
    socket.create_connection((meeting.address, meeting.port), timeout=30).sendall(mine.encode() + b"\\n")
print(json.dumps({"step": mine, "rank": ranks.rank, "port": meeting.port, "heard": heard}), flush=True)
"""


@pytest.fixture
def rank(tmp_path) -> str:
    """The words that run `RANK` in a shell."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    return f"{sys.executable} {script}"


def assert_every_step_met_itself(text: str, num_steps: int, num_ranks: int) -> None:
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


def in_folder(path: Path) -> str:
    return "".join(file.read_text() for file in path.glob("*.log"))


def test_salloc_and_srun(slurm, rank, tmp_path):
    done = run_command(["salloc", "-Q", "-N2", "-n4", "sh", "-c", f"srun {rank}"], slurm.env, cwd=tmp_path)
    assert_every_step_met_itself(done.stdout, 1, 4)


def test_steps_of_one_job_at_the_same_time(slurm, rank, tmp_path):
    steps = " & ".join([f"srun --overlap -N2 -n4 {rank}"] * 3)
    done = run_command(["salloc", "-Q", "-N2", "-n4", "sh", "-c", f"{steps} & wait"], slurm.env, cwd=tmp_path)
    assert_every_step_met_itself(done.stdout, 3, 4)


def test_tasks_of_an_array_at_the_same_time(slurm, rank, tmp_path):
    words = ["sbatch", "--wait", "--array=0-3", "-N2", "-n2", f"--output={tmp_path}/%A_%a.log"]
    run_command([*words, f"--wrap=srun {rank}"], slurm.env, cwd=tmp_path)
    wait_for(lambda: in_folder(tmp_path).count("port") == 8, 30, "the output of all tasks")
    assert_every_step_met_itself(in_folder(tmp_path), 4, 2)


def test_a_task_that_fails_early_is_named_by_the_others(slurm, rank, tmp_path):
    words = f"test $SLURM_PROCID = 2 && exit 3; exec {rank.replace('rank.py', 'short.py')}"
    (tmp_path / "short.py").write_text(RANK.replace("os.environ)\nmine", "os.environ, timeout_s=3)\nmine"))
    done = run_command(
        ["srun", "-N2", "-n4", "sh", "-c", words], slurm.env, cwd=tmp_path, check=False, timeout=40
    )
    assert done.returncode != 0
    assert done.stderr.count("2 of 3 peers have connected to ") == 3
    assert done.stderr.count("missing: rank 2") == 3
