"""Which nodes of the allocation are lost. Asked after a failure, long before Slurm itself gives a node up.

Slurm gives up a node after `SlurmdTimeout`, five minutes by default, and then takes the whole job down. Until
then a step that needs the node does not start. So each node is asked for its slurmd: where that does not
answer, no step can run, whatever the reason.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpctrain.cluster import compress_hostlist
from hpctrain.jobs.slurm_command import run_slurm

#: A slurmd answers in milliseconds; a host that is off does not refuse, but says nothing.
_ANSWER_S = 3.0
_AT_ONCE = 64
#: slurm.conf(5), SlurmdPort: what `scontrol show node` leaves out where it is so.
_SLURMD_PORT = 6818

_FIELDS = {
    name: re.compile(rf"\b{name}=(\S+)") for name in ("NodeName", "NodeAddr", "NodeHostName", "Port", "State")
}
#: In DRAIN and FAILING, what runs goes on (sinfo(1), NODE STATE CODES).
_DOWN = re.compile(r"DOWN|REBOOT")


@dataclass(frozen=True)
class Node:
    """A node as the controller has it."""

    name: str
    address: str
    port: int
    state: str

    def trouble(self) -> str | None:
        """Why nothing can run on it; None where nothing is known to be wrong."""
        if _DOWN.search(self.state):
            return f"Slurm says {self.state}"
        try:
            socket.create_connection((self.address, self.port), timeout=_ANSWER_S).close()
        except (ConnectionRefusedError, ConnectionResetError, TimeoutError) as error:
            return f"its slurmd does not answer ({type(error).__name__})"
        except OSError as error:
            # A name that cannot be resolved says nothing of the node.
            return None if isinstance(error, socket.gaierror) else f"it cannot be reached ({error.strerror})"
        return None


def lost_nodes(hosts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Those of the nodes on which nothing can run any more, and why.

    Raises:
        SchedulerError: the controller does not answer.
    """
    record = run_slurm(["scontrol", "show", "node", compress_hostlist(list(hosts))], environ)
    nodes = parse_nodes(record)
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(nodes)))) as pool:
        troubles = pool.map(Node.trouble, nodes)
        return {node.name: trouble for node, trouble in zip(nodes, troubles, strict=True) if trouble}


def parse_nodes(record: str) -> list[Node]:
    """The nodes of what `scontrol show node` prints."""
    nodes = []
    for part in record.split("\n\n"):
        found = {name: match[1] for name, pattern in _FIELDS.items() if (match := pattern.search(part))}
        if "NodeName" in found:
            address = found.get("NodeAddr") or found.get("NodeHostName") or found["NodeName"]
            port = int(found.get("Port", _SLURMD_PORT))
            nodes.append(Node(found["NodeName"], address, port, found.get("State", "")))
    return nodes
