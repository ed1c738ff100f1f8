"""Rendezvous of the ranks of a job without a given address and port.

Rank 0 uses the first free port of its host from a sequence that every rank computes identically. The other
ranks try these ports in turn. Both sides prove that they belong to the job, so foreign servers are skipped.
When all ranks are connected, rank 0 notifies them, and each rank continues with the address of its connection
to rank 0. The order of arrival does not matter.
"""

from hpctrain.cluster.rendezvous.join import RENDEZVOUS_TIMEOUT_S, RendezvousInfo, rendezvous

__all__ = ["RENDEZVOUS_TIMEOUT_S", "RendezvousInfo", "rendezvous"]
