"""Hints on steps that wait for data, and on more data workers than processors."""

from __future__ import annotations

import os

from hpctrain.text import pluralize

#: Minimum training time in seconds, and minimum fraction of waiting, for a hint.
_SEEN_S, _SHARE = 10.0, 0.2


def count_rank_cpus(ranks_here: int) -> int:
    """Return the number of processors bound to this rank, or its share of the machine's processors.

    Args:
        ranks_here: ranks on this machine.
    """
    all_here = os.cpu_count() or 1
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_here
    return own if own < all_here else max(1, all_here // max(1, ranks_here))


def can_request_cpus() -> bool:
    """True if this process is bound to a part of the machine's processors, so a job may request more."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def warn_too_many_workers(num_workers: int, cpus: int, *, can_request: bool) -> str | None:
    """Return a hint at the start; None if a rank has a processor per data worker."""
    if num_workers <= cpus:
        return None
    remedy = "Request more CPUs with --cpus-per-task, or set" if can_request else "Set"
    return (
        f"num_workers is {num_workers}, but each rank has only {pluralize(cpus, 'CPU')}. "
        f"{remedy} num_workers={cpus}."
    )


def warn_too_few_workers(
    waited_s: float, all_s: float, num_workers: int, cpus: int, *, can_request: bool
) -> str | None:
    """Return a hint during or after training; None if it is too early, or if waits for data were short.

    Args:
        waited_s: seconds during which a rank waited for batches.
        all_s: seconds of its training.
        num_workers: data workers of each rank.
        cpus: processors of each rank.
        can_request: True if the job may request more processors.
    """
    if all_s < _SEEN_S or waited_s < _SHARE * all_s:
        return None
    share = f"{waited_s / all_s:.0%}"
    said = (
        f"Training spent {share} of the first {all_s:.0f} s waiting for data with num_workers={num_workers}"
    )
    more = min(max(2 * num_workers, 1), cpus)
    if more > num_workers:
        return f"{said}. Each rank has {pluralize(cpus, 'CPU')}, so try num_workers={more}."
    remedy = "Request more CPUs with --cpus-per-task, or make" if can_request else "Make"
    return f"{said}, and each rank has only {pluralize(cpus, 'CPU')}. {remedy} data loading faster."
