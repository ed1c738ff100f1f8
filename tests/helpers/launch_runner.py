"""Run a launch of `launches.py` and determine the true rank of each process.

The truth never comes from the variables that `detect` reads. For a step of srun, it is srun's label before a
task's output, with the parent of the process (one slurmstepd per node) and the nodes of the job that
`scontrol` lists. For MPI, it comes from the MPI library; for torchrun, from the label of its log.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers import REPOSITORY, SCRIPTS
from helpers.commands import run_command
from helpers.fork_server import free_port
from helpers.waiting import wait_for
from hpctrain.cluster import detect
from hpctrain.errors import EnvironmentMismatch

PROBE = SCRIPTS / "record_rank.py"
RECORDINGS = REPOSITORY / "tests" / "cluster" / "recordings"

# A terminal writes ^@ before the first line, and \\r at the end of each.
_LABELLED = re.compile(r"^(?:\^@)? *(\d+): +(\d+)\r?$", re.MULTILINE)
_SUBMITTED = re.compile(r"^Submitted batch job (\d+)$", re.MULTILINE)
_NODE_LIST = re.compile(r" NodeList=(\S+)")
_OFFSET = re.compile(r" HetJobOffset=(\d+)")

#: Placeholders in a command and their replacements.
_PYTHON = f"{shlex.quote(sys.executable)} -I -S"
_PLACEHOLDERS = {
    "PROBE": f"{_PYTHON} {PROBE} FOLDER",
    "TORCHRUN": f"{shlex.quote(sys.executable)} -m torch.distributed.run --tee 3 --no-python",
    "SUBMITIT": f"{shlex.quote(sys.executable)} {SCRIPTS / 'record_ranks_with_submitit.py'}",
    "PRETEND_SSH": str(SCRIPTS / "fake_ssh.sh"),
}


@dataclass(frozen=True)
class Process:
    variables: dict[str, str]
    truth: dict[str, Any] | None
    """Its true rank: fields of `Ranks`, its own `host`, and rank 0's `main_host`. None for a process that
    was started alone."""


@dataclass(frozen=True)
class Record:
    pid: int
    parent: int
    told: dict[str, int]
    variables: dict[str, str]

    @property
    def host(self) -> str:
        return self.variables.get("SLURMD_NODENAME", "")

    @property
    def node(self) -> object:
        """An id that all processes of a node share.

        One process starts the ranks of a node: slurmstepd, an MPI daemon, torchrun's agent. Only horovodrun
        starts a shell per rank; it sets the host name.
        """
        return self.variables.get("HOROVOD_HOSTNAME", self.parent)

    @property
    def step(self) -> tuple[str, str]:
        return self.variables.get("SLURM_JOB_ID", ""), self.variables.get("SLURM_STEP_ID", "")


@dataclass(frozen=True)
class Launch:
    name: str
    command: str
    """A shell command. PROBE is each rank's program, node0 … are the cluster's nodes, FOLDER is empty."""
    truth: str = "label"
    """The source of the ranks: `label`, `mpi`, `torchrun`, `horovod`; `alone` if there are none."""
    refused: str = ""
    """Part of the error message, if `detect` refuses it."""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs_slurm(self) -> bool:
        return re.search("srun|salloc|sbatch|node0|SUBMITIT slurm", self.command) is not None


def run(
    launch: Launch,
    folder: Path,
    env: Mapping[str, str],
    nodes: list[str],
    placeholders: Mapping[str, str] | None = None,
) -> list[Process]:
    """Run a launch in the empty `folder` on the cluster of `env`; return its processes by rank."""
    command = launch.command
    for placeholder, text in {
        **(placeholders or {}),
        **_PLACEHOLDERS,
        "FOLDER": str(folder),
        "PORT": str(free_port()),
        **{f"node{i}": node for i, node in enumerate(nodes)},
    }.items():
        command = re.sub(rf"\b{placeholder}\b", lambda _, text=text: text, command)
    result = run_command(["bash", "-c", command], {**env, **launch.env}, cwd=folder, timeout=100)
    for job in _SUBMITTED.findall(result.stdout):
        _wait_for_end(job, env)
    logs = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
    output = result.stdout + logs
    records = [Record(**json.loads(path.read_text())) for path in folder.glob("*.json")]
    assert records, f"{command}\nstarted nothing:\n{output}\n{result.stderr}"
    if launch.truth == "alone":
        return [Process(record.variables, None) for record in records]
    if launch.truth in ("mpi", "horovod"):
        ranks = {record.pid: record.told["rank"] for record in records}
    else:
        ranks = {int(pid): int(rank) for rank, pid in _LABELLED.findall(output)}
        assert ranks.keys() >= {record.pid for record in records}, output
    processes = []
    for step in sorted({record.step for record in records}) if launch.truth == "label" else [None]:
        of_step = [record for record in records if step in (None, record.step)]
        processes += _with_truth(of_step, ranks, _hosts(records[0].step[0], env) if records[0].host else [])
    return processes


def load_recording(name: str) -> list[Process]:
    """Return the recorded processes of a launch, from `scripts/record_launches.py`."""
    document = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    common, processes = document["common"], document["processes"]
    return [Process({**common, **process["own"]}, process["truth"]) for process in processes]


def check_detection(launch: Launch, processes: list[Process]) -> None:
    """Fail unless `detect` returns each process's true rank, or refuses when it should."""
    refusals, sets = [], []
    for process in processes:
        try:
            ranks = detect(process.variables)
        except EnvironmentMismatch as error:
            refusals.append(str(error))
            continue
        if process.truth is None:
            assert (ranks.environment, ranks.rank, ranks.world_size) == ("local", 0, 1)
            continue
        detected = {name: getattr(ranks, name) for name in process.truth if hasattr(ranks, name)}
        assert detected == {name: process.truth[name] for name in detected}
        main_host = process.truth["main_host"]
        if ranks.num_nodes > 1 and main_host and "MASTER_ADDR" not in process.variables:
            assert ranks.master_addr == main_host
        if ranks.rank == 0:
            sets.append(set())
        if not launch.refused:
            sets[-1].add((ranks.master_addr, ranks.master_port, ranks.rendezvous_id))
        assert ranks.sources.keys() >= detected.keys() | {"master_addr", "master_port"}
    if launch.refused:
        assert refusals
        assert all(launch.refused in text for text in refusals), refusals
    else:
        assert not refusals
        assert all(len(endpoints) == 1 for endpoints in sets), f"ranks of one set would meet at {sets}"
        assert len(set.union(*sets)) == len(sets) if sets else True, f"two sets would meet at {sets}"


def _with_truth(records: list[Record], ranks: Mapping[int, int], hosts: list[str]) -> list[Process]:
    """Return the processes of one set with their true ranks, sorted by rank."""
    records = sorted(records, key=lambda record: ranks[record.pid])
    assert [ranks[record.pid] for record in records] == list(range(len(records)))
    nodes = list(dict.fromkeys(record.node for record in records))
    if hosts:
        host_of = {record.node: record.host for record in records}
        nodes.sort(key=lambda node: hosts.index(host_of[node]))
    processes = []
    for rank, record in enumerate(records):
        local = [other.pid for other in records if other.node == record.node]
        truth = {
            "rank": rank,
            "world_size": len(records),
            "local_rank": local.index(record.pid),
            "local_world_size": len(local),
            "node_rank": nodes.index(record.node),
            "num_nodes": len(nodes),
            "host": record.host,
            "main_host": records[0].host,
        }
        for name, value in record.told.items():
            assert truth[name] == value, f"{truth} but told {record.told}"
        processes.append(Process(record.variables, truth))
    return processes


def _wait_for_end(job: str, env: Mapping[str, str]) -> None:
    def has_ended() -> bool:
        return not run_command(["squeue", "--noheader", "--job", job], env).stdout.strip()

    wait_for(has_ended, 60, f"the end of job {job}")


def _hosts(job: str, env: Mapping[str, str]) -> list[str]:
    """Return the nodes of a job in Slurm's order, component by component of a heterogeneous job."""
    # While it completes, Slurm lists only the nodes that are still busy with it.
    _wait_for_end(job, env)
    lines = run_command(["scontrol", "show", "job", "--oneliner", job], env).stdout.splitlines()
    lines.sort(key=lambda line: int(match[1]) if (match := _OFFSET.search(line)) else 0)
    return [
        host
        for line in lines
        for names in _NODE_LIST.findall(line)
        for host in run_command(["scontrol", "show", "hostnames", names], env).stdout.split()
    ]
