"""Detection of lost nodes after a failure, long before Slurm itself gives a node up.

Slurm gives up a node after `SlurmdTimeout`, five minutes by default, and then ends the whole job. Until then,
a step that needs the node does not start. The supervisor therefore contacts each node's slurmd: if it does
not answer, no step can run there, whatever the reason.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpctrain.cluster import compress_hostlist
from hpctrain.slurm.command import run_slurm

#: A slurmd answers in milliseconds; a host that is off does not answer at all.
_ANSWER_S = 3.0
_AT_ONCE = 64
#: Default of SlurmdPort (slurm.conf(5)); `scontrol show node` omits the port then.
_SLURMD_PORT = 6818

_FIELDS = {
    **{name: re.compile(rf"\b{name}=(\S+)") for name in ("NodeName", "NodeAddr", "NodeHostName", "State")},
    "Port": re.compile(r"\bPort=([0-9]{1,5})(?!\S)"),
}
#: Running work continues in DRAIN and FAILING (sinfo(1), NODE STATE CODES).
_DOWN = re.compile(r"DOWN|REBOOT")


@dataclass(frozen=True)
class NodeHealth:
    """A node as the controller reports it."""

    name: str
    address: str
    port: int
    state: str

    def trouble(self) -> str | None:
        """Return why nothing can run on it; None without a known problem."""
        if _DOWN.search(self.state):
            return f"Slurm reports {self.state}"
        try:
            socket.create_connection((self.address, self.port), timeout=_ANSWER_S).close()
        except (ConnectionRefusedError, ConnectionResetError, TimeoutError) as error:
            return f"its slurmd does not respond ({type(error).__name__})"
        except ValueError:
            return None  # An invalid address is no fault of the node.
        except OSError as error:
            # A name that cannot be resolved is no evidence against the node.
            return None if isinstance(error, socket.gaierror) else f"it is unreachable ({error.strerror})"
        return None


def lost_nodes(hosts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes that can no longer run anything, with the reason.

    Raises:
        SchedulerError: the controller does not answer.
    """
    record = run_slurm(["scontrol", "show", "node", compress_hostlist(list(hosts))], environ)
    nodes = parse_nodes(record)
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(nodes)))) as pool:
        troubles = pool.map(NodeHealth.trouble, nodes)
        return {node.name: trouble for node, trouble in zip(nodes, troubles, strict=True) if trouble}


def parse_nodes(record: str) -> list[NodeHealth]:
    """Parse the nodes from the output of `scontrol show node`."""
    nodes = []
    for part in record.split("\n\n"):
        found = {name: match[1] for name, pattern in _FIELDS.items() if (match := pattern.search(part))}
        if "NodeName" in found:
            address = found.get("NodeAddr") or found.get("NodeHostName") or found["NodeName"]
            port = int(found.get("Port", _SLURMD_PORT))
            port = port if port < 2**16 else _SLURMD_PORT
            nodes.append(NodeHealth(found["NodeName"], address, port, found.get("State", "")))
    return nodes
