"""Tells a user whose steps wait for data, or whose data workers wait for processors, what to change."""

from __future__ import annotations

import os

#: Nothing is said of waiting before so many seconds, and unless so much of them went by with it.
_SEEN_S, _SHARE = 20.0, 0.2


def cpus_of_rank(ranks_here: int) -> int:
    """Processors for this rank: those it is bound to, or its part of the machine's.

    Args:
        ranks_here: ranks on this machine.
    """
    all_here = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_here
    return own if own < all_here else max(1, all_here // max(1, ranks_here))


def too_many_workers(num_workers: int, cpus: int) -> str | None:
    """What to say at the start; None where a rank has a processor for each of its data workers."""
    if num_workers <= cpus:
        return None
    return (
        f"num_workers is {num_workers}, and a rank has {_processors(cpus)} here, on which they take turns. "
        f"Ask for more with --cpus-per-task, or set {cpus}."
    )


def too_few_workers(waited_s: float, all_s: float, num_workers: int, cpus: int) -> str | None:
    """What to say after a while; None where little was waited for data.

    Args:
        waited_s: seconds in which a rank waited for batches.
        all_s: seconds of its training.
        num_workers: data workers of each rank.
        cpus: processors of each rank.
    """
    if all_s < _SEEN_S or waited_s < _SHARE * all_s:
        return None
    said = f"{waited_s / all_s:.0%} of the time went by waiting for data with num_workers={num_workers}"
    more = min(max(2 * num_workers, 1), cpus)
    if more > num_workers:
        return f"{said}: try {more}, for a rank has {_processors(cpus)} here."
    return (
        f"{said}, and a rank has {_processors(cpus)} here: ask for more with --cpus-per-task, "
        "or make loading cheaper."
    )


def _processors(count: int) -> str:
    return f"{count} processor{'s' if count != 1 else ''}"
