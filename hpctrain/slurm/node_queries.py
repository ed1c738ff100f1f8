"""Nodes as reported by the controller: `scontrol show node`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpctrain.cluster import compress_hostlist
from hpctrain.slurm.command import run_slurm

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
