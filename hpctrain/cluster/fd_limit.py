"""Raise the limit on open files, which also limits the number of connections of a process."""

from __future__ import annotations

import resource

from hpctrain.errors import HpctrainError

#: Open files of a process in addition to its connections.
_SPARE_FILES = 64


def raise_fd_limit(number: int) -> None:
    """Raise the soft limit, which many sites leave at 1024, to `number` connections for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= number:
        raise HpctrainError(
            f"This process requires {number} connections, one to each other rank, but may open only {hard} "
            "files (`ulimit -H -n`). Increase the limit on the nodes (LimitNOFILE of the slurmd service, or "
            "limits.conf(5)), or start fewer ranks."
        )
    required = number + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < required:
        raised = required if hard == resource.RLIM_INFINITY else min(required, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
