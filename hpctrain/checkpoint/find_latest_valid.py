"""Find the newest checkpoint that is intact and finite, and set newer ones aside."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.loading import VerifiedCheckpoint, check_shared, list_shared_steps
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.errors import CorruptCheckpoint


def find_latest_valid(
    target: CommitTarget, tier: LocalTier | None
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Collective. Find the newest valid checkpoint, preferably a finite one; set newer ones aside.

    Also return a sentence about each checkpoint that was set aside.
    """
    shared, held = set(list_shared_steps(target)), {} if tier is None else tier.gather_node_files()
    broken: list[str] = []
    checkpoint: VerifiedCheckpoint | None = None
    not_finite: list[VerifiedCheckpoint] = []
    for step in sorted(shared | held.keys(), reverse=True):
        if step in shared:
            try:
                checkpoint = check_shared(target, step)
            except CorruptCheckpoint as error:
                broken.append(set_aside(target, step, str(error)))
        if checkpoint is None and tier is not None and step in held:
            try:
                checkpoint = tier.find(step, held[step])
            except CorruptCheckpoint as error:
                broken.append(set_aside(tier.target, step, str(error)))
        if checkpoint is None:
            continue
        if checkpoint.manifest.finite is not False:
            break
        not_finite.append(checkpoint)
        checkpoint = None
    if checkpoint is None and not_finite:
        checkpoint = not_finite[0]
    else:
        for skipped in not_finite:
            step, problem = skipped.manifest.step, not_finite_problem(skipped.folder)
            if tier is not None and step in held:
                moved = set_aside(tier.target, step, problem)
            if skipped.folder.parent == target.directory.folder:
                moved = set_aside(target, step, problem)
            broken.append(moved)
    if tier is not None:
        tier.reset_to(checkpoint)
    return checkpoint, broken


def not_finite_problem(folder: Path) -> str:
    return f"{folder} contains NaN or infinite values in the parameters or the optimizer state."


def set_aside(target: CommitTarget, step: int, problem: str, suffix: str = "broken") -> str:
    def rename() -> str | None:
        # A node without a part of the checkpoint has nothing to rename.
        if not target.is_leader or step not in target.directory.steps():
            return None
        return target.directory.quarantine(step, suffix).name

    name = target.coordinator.run_on_all(rename, f"{problem} The checkpoint cannot be renamed")
    names = target.coordinator.all_gather(name, "setting a checkpoint aside")
    aside = next(filter(None, names), None)
    outcome = f"renamed to {aside}" if aside else "deleted in the meantime"
    return f"{problem} The checkpoint was {outcome}."
