"""Options that were asked for and mean nothing in this job: refused or said, never ignored in silence.

A file may well give them: it is written for many jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError
from hpctrain.jobs.given import DEFAULT, Given
from hpctrain.jobs.options import SubmitOptions, options

if TYPE_CHECKING:
    from hpctrain.jobs.spec import JobSpec


def check_idle(settings: Mapping[str, Given], given: SubmitOptions, spec: JobSpec) -> list[str]:
    """See which options of this very submission mean nothing.

    Args:
        settings: every value and where it was given.
        given: the values alone.
        spec: the job that came of them.

    Returns:
        A sentence for each that changes nothing.

    Raises:
        SpecError: one is about a part of the job that it does not have.
    """
    asked = {
        key.partition(".")[0]: options()[key.partition(".")[0]].flag
        for key, value in settings.items()
        if value.source.path is None and value.source != DEFAULT
    }
    for name, flag in asked.items():
        if spec.container is None and name.startswith("container_"):
            raise SpecError(
                f"{flag} is for a container, but none is asked for. "
                "Name its image with --container-image, or leave it out."
            )
        if spec.torchrun is None and name.startswith("rdzv_"):
            raise SpecError(
                f"{flag} is for torchrun, but srun starts the ranks (--launcher). "
                "Leave it out, or give --launcher torchrun."
            )
    reasons = dict(_reasons(given, spec))
    return [
        f"{flag} changes nothing here: {reasons[name]}." for name, flag in asked.items() if name in reasons
    ]


def _reasons(given: SubmitOptions, spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Options that change nothing in this job, and why."""
    if spec.min_nodes == spec.nodes:
        yield "grow_after", f"the number of nodes is fixed (--nodes {spec.nodes})"
    if spec.gpus_per_node == 0:
        yield "gpu_directive", "no GPU is asked for (--gpus-per-node)"
    if not spec.notify.targets:
        yield from ((name, "nobody is told (--notify)") for name in ("notify_on", "notify_stall_after"))
    elif "stall" not in spec.notify.on:
        yield "notify_stall_after", "nobody is told of a stall (--notify-on)"
    if not given.get("snapshot", True):
        yield "snapshot_limit", "nothing is copied (--no-snapshot)"
    if spec.torchrun is not None:
        yield "warm_workers", "torchrun starts the workers (--launcher)"
    if spec.backend == "local":
        others = ("spares", "grow_after", "gpu_directive", "continue_by")
        yield from ((name, "the run goes to this machine itself") for name in others)
        if spec.time_limit_s is None:
            yield "signal_lead", "there is no time limit (--time)"
