"""Listing of a run's checkpoints, based only on the manifests. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.rundir import RunDir, checkpoint_folder_name, list_checkpoint_steps, rank_steps
from hpctrain.schema import Event

TierName = Literal["shared", "local"]


@dataclass(frozen=True)
class CheckpointInfo:
    step: int
    path: Path
    tier: TierName
    """"shared" for the run folder, "local" for a local tier folder of this host."""
    manifest: Manifest | None
    problems: tuple[str, ...]
    newest: bool = False
    """True if a run would resume from this checkpoint: the newest valid one, preferably finite."""
    best: bool = False


@dataclass(frozen=True)
class BestMetric:
    metric: str
    mode: Literal["min", "max"]


def list_checkpoints(run: RunDir, *, verify: bool = False) -> tuple[list[CheckpointInfo], BestMetric | None]:
    """Return the checkpoints visible on this host, oldest first, and the metric that ranks them."""
    events = [event for event in run.read_events() if event.kind == "checkpoint"]
    rule = _best_metric(events)
    checkpoints = list(_inspect(run.checkpoints, "shared", verify=verify))
    for folder in _local_tier_folders(events):
        checkpoints += _inspect(folder, "local", verify=verify)
    # If a step is in both tiers, a run would load the local copy.
    checkpoints.sort(key=lambda checkpoint: (checkpoint.step, checkpoint.tier == "local"))
    return _mark_newest_and_best(checkpoints, rule), rule


def list_quarantined(run: RunDir) -> list[Path]:
    kinds = ("broken", "unverified")
    return sorted(path for kind in kinds for path in run.checkpoints.glob(f"step-*.{kind}-*"))


def _inspect(folder: Path, tier: TierName, *, verify: bool) -> Iterator[CheckpointInfo]:
    for step in list_checkpoint_steps(folder):
        path = folder / checkpoint_folder_name(step)
        manifest: Manifest | None = None
        try:
            manifest = Manifest.read(path)
            problems = tuple(_problems(manifest, path)) if verify else ()
        except CheckpointError as error:
            problems = (str(error),)
        # A running job may have deleted the checkpoint in the meantime.
        if not problems or path.is_dir():
            yield CheckpointInfo(step, path, tier, manifest, problems)


def _problems(manifest: Manifest, path: Path) -> Iterator[str]:
    for entry in manifest.files:
        try:
            entry.verify(path)
        except CorruptCheckpoint as error:
            yield str(error)


def _local_tier_folders(events: Iterable[Event]) -> list[Path]:
    folders = {Path(event.path).parent for event in events if event.tier == "local" and event.path}
    return sorted(folder for folder in folders if folder.is_dir())


def _best_metric(events: list[Event]) -> BestMetric | None:
    for event in reversed(events):
        if event.metric is not None:
            return BestMetric(event.metric, "max" if event.mode == "max" else "min")
    return None


def _mark_newest_and_best(checkpoints: list[CheckpointInfo], rule: BestMetric | None) -> list[CheckpointInfo]:
    intact = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.manifest is not None and not checkpoint.problems
    ]
    finite = [
        checkpoint for checkpoint in intact if checkpoint.manifest and checkpoint.manifest.finite is not False
    ]
    newest = (finite or intact)[-1] if intact else None
    best: int | None = None
    if rule is not None:
        scores = {
            checkpoint.step: checkpoint.manifest.score_by(rule.metric)
            for checkpoint in intact
            if checkpoint.manifest
        }
        best = next(iter(rank_steps(scores, rule.mode)), None)
    return [
        replace(
            checkpoint, newest=checkpoint is newest, best=checkpoint.step == best and checkpoint in intact
        )
        for checkpoint in checkpoints
    ]
