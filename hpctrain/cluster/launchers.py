"""Detect ranks of launchers that set global and local ranks, but little about the nodes.

Open MPI's `mpirun`: OMPI_COMM_WORLD_NODE_RANK is not the index of the node, but the index of the process on
its node. The index of the node follows from Slurm's node list in a Slurm job, otherwise from the number of
the daemon that started the process (OMPI_MCA_orte_local_daemon_uri; mpirun itself is daemon 0). Both are
valid only if all nodes are used. Based on Open MPI 4.1; version 5 sets no OMPI_MCA_orte_* variables.

Hydra, the `mpiexec` of MPICH and Intel MPI: `srun --mpi=pmi2` also sets PMI_RANK and PMI_SIZE, to the values
of the step; MPI_LOCALRANKID identifies Hydra. In a Slurm job, Hydra starts a proxy on each node with an srun
of one task per node. SLURM_PROCID then describes the proxy, and SLURM_NODEID is the node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.cluster.env_variables import (
    LOOPBACK,
    first_set,
    override_hint,
    read_hosts,
    read_int,
)
from hpctrain.cluster.master_address import master_endpoint
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch

Environ = Mapping[str, str]


@dataclass(frozen=True)
class LaunchedNodes:
    """The node of a process and the host of rank 0, with the source of each value."""

    node_rank: int
    num_nodes: int
    main: str
    sources: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class RankLauncher:
    """A launcher, with the names of the variables that it sets for each process."""

    name: str
    command: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    num_processes: str = ""
    """Another variable with the number of processes, if any, which must have the same value."""
    is_used: Callable[[Environ], object]
    key: Callable[[Environ], tuple[str, str]]
    """Identifier of the processes, which determines their port, and its source."""
    nodes: Callable[[Environ], LaunchedNodes | None] | None = None
    """The nodes, if there may be several; returns None if they are unknown."""
    remedy: str = ""
    """Advice for unknown nodes, with names of variables to expand."""

    def detect(self, environ: Environ) -> Ranks | None:
        """Return the ranks that the launcher assigned to this process, or None without the launcher."""
        if not self.is_used(environ):
            return None
        world_size = read_int(environ, self.world_size)
        if environ.get(self.num_processes) and read_int(environ, self.num_processes) != world_size:
            raise EnvironmentMismatch(
                f"The world size is {world_size} ({self.world_size}), but the number of processes is "
                f"{environ[self.num_processes]} ({self.num_processes}). {override_hint('slurm', 'local')}"
            )
        local_world_size = read_int(environ, self.local_world_size)
        if local_world_size == world_size:
            source = f"{self.local_world_size} = {self.world_size}"
            sources = {"node_rank": source, "num_nodes": source, "master_addr": f"one node, because {source}"}
            place = LaunchedNodes(0, 1, LOOPBACK, sources)
        else:
            place = _torch_nodes(environ) or self._find_nodes(environ)
        key, key_source = self.key(environ)
        rendezvous_id = f"{self.name}/{key}"
        address, port, endpoint_sources = master_endpoint(
            environ, lambda: (place.main, place.sources["master_addr"]), rendezvous_id, key_source
        )
        return Ranks(
            rank=read_int(environ, self.rank),
            world_size=world_size,
            local_rank=read_int(environ, self.local_rank),
            local_world_size=local_world_size,
            node_rank=place.node_rank,
            num_nodes=place.num_nodes,
            master_addr=address,
            master_port=port,
            environment=self.name,
            rendezvous_id=rendezvous_id,
            sources={
                "rank": self.rank,
                "world_size": self.world_size,
                "local_rank": self.local_rank,
                "local_world_size": self.local_world_size,
                **place.sources,
                **endpoint_sources,
            },
        )

    def _find_nodes(self, environ: Environ) -> LaunchedNodes:
        nodes = self.nodes and self.nodes(environ)
        if nodes is not None and (nodes.node_rank == 0 or read_int(environ, self.rank) != 0):
            return nodes
        raise EnvironmentMismatch(
            f"{self.command} started {environ[self.world_size]} ranks ({self.world_size}), "
            f"{environ[self.local_world_size]} of them on this node ({self.local_world_size}), but the "
            "variables that it sets do not determine the rank of this node and the host of rank 0. "
            f"{self.remedy.format_map(environ)}"
        )


def _torch_nodes(environ: Environ) -> LaunchedNodes | None:
    """Return the nodes from torch's variables, or None if a variable is missing."""
    node = first_set(environ, "NODE_RANK", "GROUP_RANK")
    if node is None or not (environ.get("GROUP_WORLD_SIZE") and environ.get("MASTER_ADDR")):
        return None
    sources = {"node_rank": node, "num_nodes": "GROUP_WORLD_SIZE", "master_addr": "MASTER_ADDR"}
    num_nodes = read_int(environ, "GROUP_WORLD_SIZE")
    return LaunchedNodes(read_int(environ, node), num_nodes, environ["MASTER_ADDR"], sources)


_NUM_NODES = "OMPI_MCA_orte_num_nodes"
_NUM_DAEMONS = "OMPI_MCA_ess_base_num_procs"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
_MPIRUN = "OMPI_MCA_orte_hnp_uri"

# Example: 1669005312.1;tcp://10.0.0.2,192.168.0.2:41441;tcp6://[fd00::2]:43493
_DAEMON_NUMBER = re.compile(r"\d+\.(\d+);")
_ADDRESS = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+)")


def started_by_orted(environ: Environ) -> bool:
    """True if an mpirun daemon, which is a job step under Slurm, started this process."""
    return _daemon_number(environ) > 0


def _daemon_number(environ: Environ) -> int:
    match = _DAEMON_NUMBER.match(environ.get(_DAEMON, ""))
    return int(match[1]) if match else -1


def _openmpi_key(environ: Environ) -> tuple[str, str]:
    job = first_set(environ, "PMIX_OPENMPIPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
    return environ[job] if job else "", job or "only the port range"


def _openmpi_nodes(environ: Environ) -> LaunchedNodes | None:
    sources = {"num_nodes": _NUM_NODES}
    if environ.get("SLURM_JOB_NODELIST"):
        hosts, name = read_hosts(environ, "SLURM_JOB_NODELIST"), environ.get("SLURMD_NODENAME")
        if name not in hosts or environ.get(_NUM_NODES) != str(len(hosts)):
            return None
        sources["node_rank"] = "SLURMD_NODENAME in SLURM_JOB_NODELIST"
        sources["master_addr"] = "first of SLURM_JOB_NODELIST"
        return LaunchedNodes(hosts.index(name), len(hosts), hosts[0], sources)
    number, address = _daemon_number(environ), _ADDRESS.search(environ.get(_MPIRUN, ""))
    # Children of mpirun itself have no variables of the daemons. These processes are on the first node, which
    # is then in use.
    if number < 0 or address is None or (number and environ.get(_NUM_DAEMONS) != environ.get(_NUM_NODES)):
        return None
    sources |= {"node_rank": f"number in {_DAEMON}", "master_addr": f"address in {_MPIRUN}"}
    return LaunchedNodes(number, read_int(environ, _NUM_NODES), address[1], sources)


def _mpich_key(environ: Environ) -> tuple[str, str]:
    # Hydra sets no run id. Two runs that start at the same time in the same folder compute the same port;
    # their ranks 0 detect each other in the rendezvous.
    if environ.get("SLURM_STEP_ID"):
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
        return "/".join(environ.get(name, "") for name in names), ", ".join(names)
    return f"{environ.get('PWD', '')}/{environ.get('PMI_SIZE')}", "PWD and PMI_SIZE"


def _mpich_nodes(environ: Environ) -> LaunchedNodes | None:
    """Return the nodes of the step in which Hydra's proxies run, or None without such a step."""
    num_nodes = environ.get("SLURM_STEP_NUM_NODES")
    if not num_nodes or environ.get("SLURM_STEP_NUM_TASKS") != num_nodes:
        return None
    sources = {"node_rank": "SLURM_NODEID", "num_nodes": "SLURM_STEP_NUM_NODES"}
    sources["master_addr"] = "first of SLURM_STEP_NODELIST"
    node_rank, host = read_int(environ, "SLURM_NODEID"), read_hosts(environ, "SLURM_STEP_NODELIST")[0]
    return LaunchedNodes(node_rank, read_int(environ, "SLURM_STEP_NUM_NODES"), host, sources)


#: These count only the nodes that have a process with the same local rank. They are valid node numbers only
#: if all nodes have the same number of ranks.
_CROSS_RANK, _CROSS_SIZE = "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _horovod_nodes(environ: Environ) -> LaunchedNodes | None:
    num_nodes = read_int(environ, _CROSS_SIZE)
    world_size, local_size = read_int(environ, "HOROVOD_SIZE"), read_int(environ, "HOROVOD_LOCAL_SIZE")
    if not environ.get("MASTER_ADDR") or world_size != num_nodes * local_size:
        return None
    sources = {"node_rank": _CROSS_RANK, "num_nodes": _CROSS_SIZE, "master_addr": "MASTER_ADDR"}
    return LaunchedNodes(read_int(environ, _CROSS_RANK), num_nodes, environ["MASTER_ADDR"], sources)


#: Ordered from inner to outer: a launcher precedes the launchers that may start it.
LAUNCHERS = (
    RankLauncher(
        name="horovod",
        command="horovodrun",
        rank="HOROVOD_RANK",
        world_size="HOROVOD_SIZE",
        local_rank="HOROVOD_LOCAL_RANK",
        local_world_size="HOROVOD_LOCAL_SIZE",
        is_used=lambda environ: first_set(environ, "HOROVOD_RANK", "HOROVOD_SIZE"),
        key=lambda environ: (":".join(environ.get(name, "") for name in _SERVER), " and ".join(_SERVER)),
        nodes=_horovod_nodes,
        remedy="Use the same number of slots on each of the {HOROVOD_CROSS_SIZE} hosts (HOROVOD_CROSS_SIZE), "
        "and set MASTER_ADDR to the host of rank 0: MASTER_ADDR=HOST0 horovodrun -H HOST0:N,HOST1:N …",
    ),
    RankLauncher(
        name="openmpi",
        command="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        num_processes="OMPI_MCA_orte_ess_num_procs",
        is_used=lambda environ: first_set(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        key=_openmpi_key,
        nodes=_openmpi_nodes,
        remedy="Start mpirun on one of the nodes, with ranks on all nodes and rank 0 on the first node. "
        "Alternatively, start the script with srun, or pass the missing variables to each node: "
        "mpirun -n N -x MASTER_ADDR=HOST0 -x GROUP_WORLD_SIZE=2 -x NODE_RANK=0 PROGRAM : "
        "-n N -x … -x NODE_RANK=1 PROGRAM.",
    ),
    RankLauncher(
        name="mpich",
        command="mpiexec",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        is_used=lambda environ: environ.get("PMI_RANK") and environ.get("MPI_LOCALRANKID"),
        key=_mpich_key,
        nodes=_mpich_nodes,
        remedy="Start the script with srun, or pass the missing variables: mpiexec -hosts HOST0,HOST1 -genv "
        "MASTER_ADDR HOST0 -genv GROUP_WORLD_SIZE 2 -n N -env NODE_RANK 0 PROGRAM : -n N -env NODE_RANK 1 "
        "PROGRAM.",
    ),
    RankLauncher(
        name="submitit",
        command="submitit",
        rank="SUBMITIT_LOCAL_GLOBALID",
        world_size="SUBMITIT_LOCAL_NTASKS",
        local_rank="SUBMITIT_LOCAL_LOCALID",
        # The local executor supports only one node.
        local_world_size="SUBMITIT_LOCAL_NTASKS",
        is_used=lambda environ: (
            environ.get("SUBMITIT_LOCAL_JOB_ID") and environ.get("SUBMITIT_EXECUTOR", "local") == "local"
        ),
        key=lambda environ: (environ["SUBMITIT_LOCAL_JOB_ID"], "SUBMITIT_LOCAL_JOB_ID"),
    ),
)
