"""The limit on open files, which also limits the number of connections of a process."""

from __future__ import annotations

import resource

from hpctrain.errors import HpctrainError

#: Open files of a process in addition to its connections.
_SPARE_FILES = 64


def raise_fd_limit(number: int) -> None:
    """Raise the limit to `number` connections for this process and its children.

    Only the soft limit is raised; many sites leave it at 1024.

    Raises:
        HpctrainError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= number:
        raise HpctrainError(
            f"This process requires {number} connections, one to each other rank, but may open only {hard} "
            "files (`ulimit -H -n`). Increase the limit on the nodes (LimitNOFILE of the slurmd service, or "
            "limits.conf(5)), or start fewer ranks."
        )
    wanted = number + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
