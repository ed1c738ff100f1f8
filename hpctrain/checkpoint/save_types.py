"""Records of a pending and of a committed save."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.staging import StagedState
from hpctrain.errors import CheckpointError
from hpctrain.rundir import checkpoint_folder_name


@dataclass(frozen=True)
class CommittedSave:
    step: int
    path: Path
    total_bytes: int
    seconds: float
    """Seconds from the call of `async_save` or `save` to the commit, on this rank."""
    score: float | None = None
    finite: bool | None = True
    """See `Manifest`."""
    world_size: int = 1
    notes: tuple[str, ...] = ()
    """Messages about problems that did not prevent the checkpoint."""


@dataclass
class PendingSave:
    step: int
    score: float | None
    started_at: float
    staged: StagedState | None
    problem: str | None
    """Reason if this rank has nothing to write."""
    direct: bool
    """True if the save bypasses the local tier."""
    verified_step: int | None = None
    """See `Manifest`."""
    time: float = field(default_factory=time.time)
    abort: threading.Event = field(default_factory=threading.Event)
    outcome: CommittedSave | CheckpointError | None = None
    thread: threading.Thread | None = None


def describe_save(
    directory: CheckpointDir, manifest: Manifest, begun: float, notes: list[str]
) -> CommittedSave:
    return CommittedSave(
        step=manifest.step,
        path=directory.folder / checkpoint_folder_name(manifest.step),
        total_bytes=manifest.total_bytes,
        seconds=time.monotonic() - begun,
        score=manifest.score,
        finite=manifest.finite,
        world_size=manifest.world_size,
        notes=tuple(notes),
    )
