"""Rendezvous of the ranks of a job if no address and port are given.

Rank 0 takes the first free port of its host from a sequence that every rank computes identically. The other
ranks try these ports in turn. Both sides prove that they belong to the job, so foreign servers are skipped.
When all ranks are connected, rank 0 notifies them, and each continues with an address at which it reached
rank 0. The order of arrival does not matter.
"""

from hpctrain.cluster.rendezvous.join import RENDEZVOUS_TIMEOUT_S, RendezvousInfo, rendezvous

__all__ = ["RENDEZVOUS_TIMEOUT_S", "RendezvousInfo", "rendezvous"]
