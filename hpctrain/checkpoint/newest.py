"""Which checkpoint a run goes on from: the newest whole one, wherever it lies."""

from __future__ import annotations

from hpctrain.checkpoint.commit import Site
from hpctrain.checkpoint.loading import Whole, check_shared, newest_in
from hpctrain.checkpoint.place import Place
from hpctrain.checkpoint.tier import Tier
from hpctrain.errors import BrokenCheckpoint


def newest_whole(site: Site, tier: Tier | None) -> tuple[Whole | None, list[str]]:
    """Find the newest whole checkpoint; set broken newer ones aside. All ranks must call this.

    Returns:
        The checkpoint or None, and for each broken one a sentence that names it, says what is wrong, and
        where it lies now.

    Raises:
        CheckpointError: on all ranks alike: whether one is whole cannot be told now. Nothing was changed.
    """
    shared, held = set(newest_in(site)), {} if tier is None else tier.holdings()
    broken: list[str] = []
    found: Whole | None = None
    for step in sorted(shared | held.keys(), reverse=True):
        if step in shared:
            try:
                found = check_shared(site, step)
                break
            except BrokenCheckpoint as error:
                broken.append(_set_aside(site, site.place, step, str(error)))
        if tier is not None and step in held:
            try:
                found = tier.find(step, held[step])
                break
            except BrokenCheckpoint as error:
                broken.append(_set_aside(tier.site, tier.site.place, step, str(error)))
    if tier is not None:
        tier.start_from(found)
    return found, broken


def _set_aside(site: Site, place: Place, step: int, problem: str) -> str:
    def rename() -> str | None:
        # On a node that has no part of it there is nothing to rename.
        if not site.leads or step not in place.steps():
            return None
        return place.set_aside(step).name

    name = site.agreement.together(rename, f"{problem} It cannot be set aside")
    names = site.agreement.all(name, "setting a checkpoint aside")
    return f"{problem} It was set aside as {next(filter(None, names), 'nothing: it is gone')}."
