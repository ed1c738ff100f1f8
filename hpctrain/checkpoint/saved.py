"""A save: while it is under way, and what has become of it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.checkpoint.capture import Captured
from hpctrain.checkpoint.manifest import Manifest
from hpctrain.checkpoint.place import Place
from hpctrain.errors import CheckpointError
from hpctrain.rundir import step_name


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    step: int
    path: Path
    total_bytes: int
    seconds: float
    """From the call of `begin` or `save` until it was committed, on this rank."""
    stall_s: float = 0.0
    """How long that call kept this rank from training."""
    score: float | None = None
    world_size: int = 1
    notes: tuple[str, ...] = ()
    """Sentences about what did not go as it should, although the checkpoint is there."""


@dataclass
class Save:
    """A save in flight."""

    step: int
    score: float | None
    begun: float
    captured: Captured | None
    problem: str | None
    """Why this rank has nothing to write."""
    direct: bool
    """Whether the second tier is passed by."""
    time: float = field(default_factory=time.time)
    stall_s: float = 0.0
    give_up: threading.Event = field(default_factory=threading.Event)
    outcome: Saved | CheckpointError | None = None
    thread: threading.Thread | None = None


def saved_in(place: Place, manifest: Manifest, begun: float, stall_s: float, notes: list[str]) -> Saved:
    """What is told of a checkpoint that was committed just now.

    Args:
        place: where it lies.
        manifest: what it consists of.
        begun: when it was begun, by the monotonic clock.
        stall_s: how long it kept this rank from training.
        notes: what did not go as it should.
    """
    return Saved(
        step=manifest.step,
        path=place.folder / step_name(manifest.step),
        total_bytes=manifest.total_bytes,
        seconds=time.monotonic() - begun,
        stall_s=stall_s,
        score=manifest.score,
        world_size=manifest.world_size,
        notes=tuple(notes),
    )
