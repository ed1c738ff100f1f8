"""How the ranks of a job find each other where nobody has told them an address and a port.

Rank 0 takes the first port that is free on its host, of a sequence that every rank computes alike. The
others knock at these ports in turn and say which job they belong to, so that a foreign server on one of them
is passed over and never believed. When all have come, rank 0 tells them so, and each goes on with an address
that it has reached rank 0 at. Nothing in it depends on who comes first.
"""

from hpctrain.cluster.meeting.meet import MEETING_TIMEOUT_S, Meeting, meet

__all__ = ["MEETING_TIMEOUT_S", "Meeting", "meet"]
