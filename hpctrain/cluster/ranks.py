"""Define the ranks of a process in its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hpctrain.cluster.env_variables import override_hint
from hpctrain.errors import EnvironmentMismatch


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process in a distributed job, in torch's terms, and the source of each value.

    Raises:
        EnvironmentMismatch: on construction, if the values contradict each other.
    """

    rank: int
    """Index of this process among all processes, from 0."""
    world_size: int
    """Total number of processes on all nodes."""
    local_rank: int
    """Index of this process among the processes of its node, from 0."""
    local_world_size: int
    """Number of processes on this node."""
    node_rank: int
    """Index of this node among the nodes, from 0."""
    num_nodes: int
    """Number of nodes."""
    master_addr: str
    """Host of the rendezvous."""
    master_port: int
    """TCP port of the rendezvous; 0 for a single process."""
    environment: str
    """Name of the detector; `hpctrain.cluster.detection` lists the names."""
    rendezvous_id: str = ""
    """Identifier of this set of processes on its hosts, equal on every rank; empty for a single process.
    Determines the port of the rendezvous (`hpctrain.cluster.ports`)."""
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """For each field, the variable or derivation of its value."""

    def __post_init__(self) -> None:
        self._check("rank", "world_size")
        self._check("local_rank", "local_world_size")
        self._check("node_rank", "num_nodes")
        elsewhere = self.world_size - self.local_world_size
        if elsewhere < self.num_nodes - 1 or (self.num_nodes == 1 and elsewhere):
            raise EnvironmentMismatch(
                f"{self._describe_field('local_world_size')} and {self._describe_field('num_nodes')} "
                f"contradict {self._describe_field('world_size')}. {override_hint('local')}"
            )

    def _check(self, index: str, count: str) -> None:
        if not 0 <= getattr(self, index) < getattr(self, count):
            raise EnvironmentMismatch(
                f"{self._describe_field(index)} is out of range for {self._describe_field(count)}. "
                f"{override_hint('local')}"
            )

    def _describe_field(self, name: str) -> str:
        return f"{name} {getattr(self, name)} ({self.sources.get(name, self.environment)})"

    @property
    def is_main(self) -> bool:
        """True for rank 0, which writes all files that are written once."""
        return self.rank == 0

    def torch_variables(self) -> dict[str, str]:
        """Return the variables for `torch.distributed`'s `env://` and scripts written for torchrun."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
