"""How many connections a process may have: each is an open file, of which the system allows so many."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

from hpctrain.errors import HpctrainError

#: Files that a process has open besides its connections.
_SPARE_FILES = 64


def allow_connections(number: int) -> None:
    """Let this process, and what it starts, have `number` connections at once, from here on.

    Only the soft limit is raised; many sites leave it at 1024.

    Raises:
        HpctrainError: the hard limit is lower than that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= number:
        raise HpctrainError(
            f"{number} connections are needed here, one to each of the other ranks, but this process may "
            f"have only {hard} files open (`ulimit -H -n`). Raise that limit on the nodes, by LimitNOFILE "
            "of slurmd's service or limits.conf(5), or start fewer ranks."
        )
    wanted = number + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


@contextlib.contextmanager
def connections_allowed(number: int) -> Iterator[None]:
    """The same for the length of a block.

    Raises:
        HpctrainError: the hard limit is lower than that.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_connections(number)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
