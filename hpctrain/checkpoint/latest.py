"""Selection of the checkpoint to resume from: the newest valid one, in either tier."""

from __future__ import annotations

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.loading import VerifiedCheckpoint, check_shared, list_shared_steps
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.errors import CorruptCheckpoint


def find_latest_valid(
    site: CommitTarget, tier: LocalTier | None
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Find the newest valid checkpoint; set broken newer ones aside. All ranks must call this.

    Returns:
        The checkpoint or None, and for each broken one a sentence with its name, the problem and its new
            location.

    Raises:
        CheckpointError: on all ranks: a checkpoint cannot be checked at the moment. It is left unchanged.
    """
    shared, held = set(list_shared_steps(site)), {} if tier is None else tier.holdings()
    broken: list[str] = []
    found: VerifiedCheckpoint | None = None
    for step in sorted(shared | held.keys(), reverse=True):
        if step in shared:
            try:
                found = check_shared(site, step)
                break
            except CorruptCheckpoint as error:
                broken.append(_set_aside(site, site.place, step, str(error)))
        if tier is not None and step in held:
            try:
                found = tier.find(step, held[step])
                break
            except CorruptCheckpoint as error:
                broken.append(_set_aside(tier.site, tier.site.place, step, str(error)))
    if tier is not None:
        tier.start_from(found)
    return found, broken


def _set_aside(site: CommitTarget, place: CheckpointDir, step: int, problem: str) -> str:
    def rename() -> str | None:
        # A node that has no part of it has nothing to rename.
        if not site.leads or step not in place.steps():
            return None
        return place.set_aside(step).name

    name = site.agreement.together(rename, f"{problem} It cannot be set aside")
    names = site.agreement.all(name, "setting a checkpoint aside")
    aside = next(filter(None, names), None)
    return f"{problem} It was set aside as {aside}." if aside else f"{problem} It has been deleted since."
