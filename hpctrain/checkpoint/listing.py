"""What lies in the checkpoints of a run, from their manifests alone. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.checkpoint.manifest import Manifest
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import RunDir, step_name, steps_in

Tier = Literal["shared", "local"]


@dataclass(frozen=True)
class Listed:
    """One checkpoint, as far as it was looked at."""

    step: int
    path: Path
    tier: Tier
    """Whether it lies in the run folder or in a fast folder of this host."""
    manifest: Manifest | None
    """What it consists of; None where that cannot be read."""
    problems: tuple[str, ...]
    """What is wrong with it, a sentence for each file."""
    newest: bool = False
    """Whether a run would go on from it: the newest in which nothing wrong was seen."""
    best: bool = False
    """Whether it has the best score of all."""


@dataclass(frozen=True)
class Rule:
    """By what the best checkpoints of a run are kept."""

    metric: str
    mode: Literal["min", "max"]


def list_checkpoints(run: RunDir, *, verify: bool = False) -> tuple[list[Listed], Rule | None]:
    """The checkpoints of `run`, the oldest first, and by what the best of them is told.

    Those in a fast folder of another host are out of sight.

    Args:
        run: the run.
        verify: compare every file with its checksum, which reads all of them.
    """
    events = [event for event in run.read_events() if event.get("kind") == "checkpoint"]
    rule = _rule(events)
    found = list(_look(run.checkpoints, "shared", verify=verify))
    for folder in _fast_folders(events):
        found += _look(folder, "local", verify=verify)
    # Of a step that lies in both, a run would load the copy on its own host.
    found.sort(key=lambda one: (one.step, one.tier == "local"))
    return _marked(found, rule), rule


def set_aside(run: RunDir) -> list[Path]:
    """Folders in which a run found something broken and which it put out of the way."""
    return sorted(run.checkpoints.glob("step-*.broken-*"))


def _look(folder: Path, tier: Tier, *, verify: bool) -> Iterator[Listed]:
    for step in steps_in(folder):
        path = folder / step_name(step)
        manifest: Manifest | None = None
        try:
            manifest = Manifest.read(path)
            problems = tuple(_problems(manifest, path)) if verify else ()
        except CheckpointError as error:
            problems = (str(error),)
        # A run that goes on may have deleted it meanwhile.
        if not problems or path.is_dir():
            yield Listed(step, path, tier, manifest, problems)


def _problems(manifest: Manifest, path: Path) -> Iterator[str]:
    for entry in manifest.files:
        try:
            entry.verify(path)
        except BrokenCheckpoint as error:
            yield str(error)


def _fast_folders(events: Iterable[Mapping[str, Any]]) -> list[Path]:
    folders = {Path(event["path"]).parent for event in events if event.get("tier") == "local"}
    return sorted(folder for folder in folders if folder.is_dir())


def _rule(events: list[dict[str, Any]]) -> Rule | None:
    """What the newest event says; a run may have been continued with another rule."""
    for event in reversed(events):
        if (metric := event.get("metric")) is not None:
            return Rule(str(metric), "max" if event.get("mode") == "max" else "min")
    return None


def _marked(found: list[Listed], rule: Rule | None) -> list[Listed]:
    whole = [one for one in found if one.manifest is not None and not one.problems]
    newest = whole[-1] if whole else None
    scores = {
        one.step: one.manifest.score
        for one in whole
        if one.manifest and one.manifest.score is not None and not math.isnan(one.manifest.score)
    }
    best: int | None = None
    if rule is not None and scores:
        sign = 1 if rule.mode == "min" else -1
        best = min(scores, key=lambda step: (sign * scores[step], -step))
    return [replace(one, newest=one is newest, best=one.step == best and one in whole) for one in found]
