"""Query the nodes of a cluster, and find lost, draining and idle ones.

Slurm marks a node down after `SlurmdTimeout`, five minutes by default, and then ends the job. Until then, a
step that needs the node does not start. The slurmd of each node is therefore contacted. If it does not
respond, no step can run on that node.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpctrain import system
from hpctrain.cluster import compress_hostlist
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import query_config

#: A slurmd responds in milliseconds; a host that is off does not respond at all.
_ANSWER_S = 3.0
_AT_ONCE = 64
#: Running work continues in DRAIN and FAILING (sinfo(1), NODE STATE CODES).
#: A requested reboot or power-down waits for the end of the job.
_DOWN = re.compile(r"\bDOWN\b|POWERED_DOWN|POWERING_DOWN|REBOOT_ISSUED")
_DRAINING = re.compile(r"DRAIN|FAIL")

_FIELDS = {
    **{name: re.compile(rf"\b{name}=(\S+)") for name in ("NodeName", "NodeAddr", "NodeHostName", "State")},
    **{name: re.compile(rf"\b{name}=(\d{{1,18}})") for name in ("RealMemory", "MemSpecLimit")},
    "Reason": re.compile(r"\bReason=(.+?)(?: \[\S+@\S+\])?$", re.MULTILINE),
    "Port": re.compile(r"\bPort=([0-9]{1,5})(?!\S)"),
}


@dataclass(frozen=True)
class NodeRecord:
    name: str
    address: str
    port: int | None
    """Port of the node's slurmd; None if it is the SlurmdPort of the cluster."""
    state: str
    memory_mib: int = 0
    """Memory for jobs."""
    reason: str = ""
    """Reason for the state, as set by an administrator or a health check."""


def query_nodes(hosts: Sequence[str], environ: Mapping[str, str]) -> list[NodeRecord]:
    return parse_nodes(run_slurm(["scontrol", "show", "node", compress_hostlist(list(hosts))], environ))


def parse_nodes(output: str) -> list[NodeRecord]:
    nodes = []
    for record in output.split("\n\n"):
        values = {name: match[1] for name, pattern in _FIELDS.items() if (match := pattern.search(record))}
        if "NodeName" in values:
            address = values.get("NodeAddr") or values.get("NodeHostName") or values["NodeName"]
            port = int(values["Port"]) if "Port" in values else None
            port = None if port is None or port >= 2**16 else port
            memory = int(values.get("RealMemory", 0)) - int(values.get("MemSpecLimit", 0))
            state, reason = values.get("State", ""), values.get("Reason", "")
            nodes.append(NodeRecord(values["NodeName"], address, port, state, memory, reason))
    return nodes


def find_lost_nodes(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that can no longer run processes, with the reason."""
    nodes = query_nodes(hosts, environ)
    if any(node.port is None for node in nodes):
        port = query_config(environ).slurmd_port
        nodes = [replace(node, port=port) if node.port is None else node for node in nodes]
    with system.ThreadPoolExecutor(min(_AT_ONCE, max(1, len(nodes)))) as pool:
        troubles = pool.map(node_trouble, nodes)
        return {node.name: trouble for node, trouble in zip(nodes, troubles, strict=True) if trouble}


def node_trouble(node: NodeRecord) -> str | None:
    """Return the reason why no process can run on a node; None without a known problem."""
    if _DOWN.search(node.state):
        return f"Slurm reports the state {node.state}"
    try:
        system.create_connection((node.address, node.port), timeout=_ANSWER_S).close()
    except (ConnectionRefusedError, ConnectionResetError, TimeoutError) as error:
        return f"slurmd is not responding ({type(error).__name__})"
    except ValueError:
        return None  # An invalid address is not a fault of the node.
    except OSError as error:
        # A name that cannot be resolved is no evidence against the node.
        return None if isinstance(error, socket.gaierror) else f"the node is unreachable ({error.strerror})"
    return None


def find_draining_nodes(hosts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that will be taken out of service when their job ends, with the reason."""
    return {
        node.name: f"Slurm reports the state {node.state}" + (f" ({node.reason})" if node.reason else "")
        for node in query_nodes(hosts, environ)
        if _DRAINING.search(node.state) and "DOWN" not in node.state
    }


def find_idle_nodes(partition: str, environ: Mapping[str, str]) -> set[str]:
    """Return the idle nodes of a partition; none if jobs wait for nodes."""
    waiting = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%i"]
    if run_slurm(waiting, environ).strip():
        return set()
    idle = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--states=idle", "--format=%N"]
    return set(run_slurm(idle, environ).split())
