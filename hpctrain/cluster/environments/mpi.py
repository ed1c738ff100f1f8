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
    master_endpoint,
    override_hint,
    read_hosts,
    read_int,
)
from hpctrain.cluster.ranks import Ranks
from hpctrain.errors import EnvironmentMismatch


@dataclass(frozen=True)
class RankVariables:
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str


@dataclass(frozen=True)
class LaunchedNodes:
    """The node of a process and the host of rank 0, with the source of each value."""

    node_rank: int
    num_nodes: int
    main: str
    sources: Mapping[str, str]


def ranks_of(
    environ: Mapping[str, str],
    environment: str,
    names: RankVariables,
    *,
    key: tuple[str, str],
    nodes: Callable[[], LaunchedNodes] | None = None,
) -> Ranks:
    """Return the ranks in the variables `names`."""
    world_size = read_int(environ, names.world_size)
    local_world_size = read_int(environ, names.local_world_size)
    if local_world_size == world_size:
        source = f"{names.local_world_size} = {names.world_size}"
        sources = {"node_rank": source, "num_nodes": source, "master_addr": f"one node, because {source}"}
        place = LaunchedNodes(0, 1, LOOPBACK, sources)
    else:
        assert nodes is not None, f"{environment} has only one node"
        place = _torch_nodes(environ) or nodes()
    rendezvous_id, key_source = f"{environment}/{key[0]}", key[1]
    address, port, endpoint_sources = master_endpoint(
        environ, lambda: (place.main, place.sources["master_addr"]), rendezvous_id, key_source
    )
    return Ranks(
        rank=read_int(environ, names.rank),
        world_size=world_size,
        local_rank=read_int(environ, names.local_rank),
        local_world_size=local_world_size,
        node_rank=place.node_rank,
        num_nodes=place.num_nodes,
        master_addr=address,
        master_port=port,
        environment=environment,
        rendezvous_id=rendezvous_id,
        sources={
            "rank": names.rank,
            "world_size": names.world_size,
            "local_rank": names.local_rank,
            "local_world_size": names.local_world_size,
            **place.sources,
            **endpoint_sources,
        },
    )


def unknown_nodes_error(
    launcher: str, names: RankVariables, environ: Mapping[str, str], remedy: str
) -> EnvironmentMismatch:
    """Return the error for ranks on several nodes whose order is uncertain."""
    return EnvironmentMismatch(
        f"{launcher} started {environ[names.world_size]} ranks ({names.world_size}), "
        f"{environ[names.local_world_size]} of them on this node ({names.local_world_size}), but the "
        f"variables that it sets do not determine the rank of this node and the host of rank 0. {remedy}"
    )


def _torch_nodes(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the nodes from torch's variables, or None if a variable is missing."""
    node = first_set(environ, "NODE_RANK", "GROUP_RANK")
    if node is None or not (environ.get("GROUP_WORLD_SIZE") and environ.get("MASTER_ADDR")):
        return None
    return LaunchedNodes(
        read_int(environ, node),
        read_int(environ, "GROUP_WORLD_SIZE"),
        environ["MASTER_ADDR"],
        {"node_rank": node, "num_nodes": "GROUP_WORLD_SIZE", "master_addr": "MASTER_ADDR"},
    )


_OPENMPI = RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_NUM_NODES = "OMPI_MCA_orte_num_nodes"
_NUM_DAEMONS = "OMPI_MCA_ess_base_num_procs"
_DAEMON = "OMPI_MCA_orte_local_daemon_uri"
_MPIRUN = "OMPI_MCA_orte_hnp_uri"
_NUM_PROCESSES = "OMPI_MCA_orte_ess_num_procs"

# Example: 1669005312.1;tcp://10.0.0.2,192.168.0.2:41441;tcp6://[fd00::2]:43493
_DAEMON_NUMBER = re.compile(r"\d+\.(\d+);")
_ADDRESS = re.compile(r"tcp://(\d+\.\d+\.\d+\.\d+)")


def detect_openmpi(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `mpirun` assigned to this process, or None without such a launcher."""
    if not (environ.get(_OPENMPI.rank) or environ.get(_OPENMPI.world_size)):
        return None
    world_size = read_int(environ, _OPENMPI.world_size)
    if environ.get(_NUM_PROCESSES) and read_int(environ, _NUM_PROCESSES) != world_size:
        raise EnvironmentMismatch(
            f"The world size is {world_size} ({_OPENMPI.world_size}), but the number of processes is "
            f"{environ[_NUM_PROCESSES]} ({_NUM_PROCESSES}). {override_hint('slurm', 'local')}"
        )
    job = first_set(environ, "PMIX_OPENMPIPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
    return ranks_of(
        environ,
        "openmpi",
        _OPENMPI,
        key=(environ[job] if job else "", job or "only the port range"),
        nodes=lambda: _openmpi_nodes(environ),
    )


def started_by_orted(environ: Mapping[str, str]) -> bool:
    """True if an mpirun daemon, which is a job step under Slurm, started this process."""
    return _daemon_number(environ) > 0


def _openmpi_nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    nodes = _nodes_of_slurm_job(environ) if environ.get("SLURM_JOB_NODELIST") else _nodes_by_daemon(environ)
    if nodes is None or (read_int(environ, _OPENMPI.rank) == 0 and nodes.node_rank != 0):
        raise unknown_nodes_error(
            "mpirun",
            _OPENMPI,
            environ,
            "Start mpirun on one of the nodes, with ranks on all nodes and rank 0 on the first node. "
            "Alternatively, start the script with srun, or pass the missing variables to each node: "
            "mpirun -n N -x MASTER_ADDR=HOST0 -x GROUP_WORLD_SIZE=2 -x NODE_RANK=0 PROGRAM : "
            "-n N -x … -x NODE_RANK=1 PROGRAM.",
        )
    return nodes


def _nodes_of_slurm_job(environ: Mapping[str, str]) -> LaunchedNodes | None:
    hosts = read_hosts(environ, "SLURM_JOB_NODELIST")
    name = environ.get("SLURMD_NODENAME")
    if name not in hosts or environ.get(_NUM_NODES) != str(len(hosts)):
        return None
    return LaunchedNodes(
        hosts.index(name),
        len(hosts),
        hosts[0],
        {
            "node_rank": "SLURMD_NODENAME in SLURM_JOB_NODELIST",
            "num_nodes": _NUM_NODES,
            "master_addr": "first of SLURM_JOB_NODELIST",
        },
    )


def _nodes_by_daemon(environ: Mapping[str, str]) -> LaunchedNodes | None:
    number, address = _daemon_number(environ), _ADDRESS.search(environ.get(_MPIRUN, ""))
    # Children of mpirun itself have no variables of the daemons. These processes are on the first node, which
    # is then in use.
    if number < 0 or address is None or (number and environ.get(_NUM_DAEMONS) != environ.get(_NUM_NODES)):
        return None
    return LaunchedNodes(
        number,
        read_int(environ, _NUM_NODES),
        address[1],
        {
            "node_rank": f"number in {_DAEMON}",
            "num_nodes": _NUM_NODES,
            "master_addr": f"address in {_MPIRUN}",
        },
    )


def _daemon_number(environ: Mapping[str, str]) -> int:
    match = _DAEMON_NUMBER.match(environ.get(_DAEMON, ""))
    return int(match[1]) if match else -1


_MPICH = RankVariables(
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
_STEP = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")


def detect_mpich(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `mpiexec` assigned to this process, or None without such a launcher."""
    if not (environ.get(_MPICH.rank) and environ.get(_MPICH.local_rank)):
        return None
    # Hydra sets no run id. Two runs that start at the same time in the same folder compute the same port;
    # their ranks 0 detect each other in the rendezvous.
    if environ.get("SLURM_STEP_ID"):
        step = "/".join(environ.get(name, "") for name in _STEP)
        key = (step, ", ".join(_STEP))
    else:
        key = (f"{environ.get('PWD', '')}/{environ.get(_MPICH.world_size)}", f"PWD and {_MPICH.world_size}")
    return ranks_of(environ, "mpich", _MPICH, key=key, nodes=lambda: _mpich_nodes(environ))


def _mpich_nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    nodes = _nodes_of_proxies(environ)
    if nodes is None or (read_int(environ, _MPICH.rank) == 0 and nodes.node_rank != 0):
        raise unknown_nodes_error(
            "mpiexec",
            _MPICH,
            environ,
            "Start the script with srun, or pass the missing variables: mpiexec -hosts HOST0,HOST1 -genv "
            "MASTER_ADDR HOST0 "
            "-genv GROUP_WORLD_SIZE 2 -n N -env NODE_RANK 0 PROGRAM : -n N -env NODE_RANK 1 PROGRAM.",
        )
    return nodes


def _nodes_of_proxies(environ: Mapping[str, str]) -> LaunchedNodes | None:
    """Return the nodes of the step in which Hydra's proxies run, or None without such a step."""
    num_nodes = environ.get("SLURM_STEP_NUM_NODES")
    if not num_nodes or environ.get("SLURM_STEP_NUM_TASKS") != num_nodes:
        return None
    return LaunchedNodes(
        read_int(environ, "SLURM_NODEID"),
        read_int(environ, "SLURM_STEP_NUM_NODES"),
        read_hosts(environ, "SLURM_STEP_NODELIST")[0],
        {
            "node_rank": "SLURM_NODEID",
            "num_nodes": "SLURM_STEP_NUM_NODES",
            "master_addr": "first of SLURM_STEP_NODELIST",
        },
    )


_HOROVOD = RankVariables(
    rank="HOROVOD_RANK",
    world_size="HOROVOD_SIZE",
    local_rank="HOROVOD_LOCAL_RANK",
    local_world_size="HOROVOD_LOCAL_SIZE",
)
#: These count only the nodes that have a process with the same local rank. They are valid node numbers only
#: if all nodes have the same number of ranks.
_CROSS_RANK, _CROSS_SIZE = "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE"
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def detect_horovod(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks that `horovodrun` assigned to this process, or None without such a launcher."""
    if not (environ.get(_HOROVOD.rank) or environ.get(_HOROVOD.world_size)):
        return None
    server = ":".join(environ.get(name, "") for name in _SERVER)
    key = (server, " and ".join(_SERVER))
    return ranks_of(environ, "horovod", _HOROVOD, key=key, nodes=lambda: _horovod_nodes(environ))


def _horovod_nodes(environ: Mapping[str, str]) -> LaunchedNodes:
    address = first_set(environ, "MASTER_ADDR")
    num_nodes = read_int(environ, _CROSS_SIZE)
    even = read_int(environ, _HOROVOD.world_size) == num_nodes * read_int(environ, _HOROVOD.local_world_size)
    if address is None or not even:
        raise unknown_nodes_error(
            "horovodrun",
            _HOROVOD,
            environ,
            f"Use the same number of slots on each of the {num_nodes} hosts ({_CROSS_SIZE}), and set "
            "MASTER_ADDR to the host of rank 0: MASTER_ADDR=HOST0 horovodrun -H HOST0:N,HOST1:N …",
        )
    sources = {"node_rank": _CROSS_RANK, "num_nodes": _CROSS_SIZE, "master_addr": address}
    return LaunchedNodes(read_int(environ, _CROSS_RANK), num_nodes, environ[address], sources)


_SUBMITIT = RankVariables(
    rank="SUBMITIT_LOCAL_GLOBALID",
    world_size="SUBMITIT_LOCAL_NTASKS",
    local_rank="SUBMITIT_LOCAL_LOCALID",
    # The local executor supports only one node.
    local_world_size="SUBMITIT_LOCAL_NTASKS",
)
_JOB = "SUBMITIT_LOCAL_JOB_ID"


def detect_submitit(environ: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this task of a local submitit job, or None outside such a job."""
    if not environ.get(_JOB) or environ.get("SUBMITIT_EXECUTOR", "local") != "local":
        return None
    return ranks_of(environ, "submitit", _SUBMITIT, key=(environ[_JOB], _JOB))
