"""Read the record of training in a run folder, and plan which steps to train again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.errors import SpecError
from hpctrain.files import read_json_lines
from hpctrain.record_types import Event, StepRecord, TrainedSamples, read_records
from hpctrain.rundir import RunDir
from hpctrain.text import join_or

_SAMPLES_FILE = re.compile(r"attempt-(\d+)-rank-(\d+)\.jsonl")
#: Events that the ranks of an attempt write.
_TRAINING_EVENTS = ("resumed", "checkpoint", "bad_loss")


class RankShape(NamedTuple):
    nodes: int
    world_size: int
    micro_batch_size: int | None = None
    """Maximum micro-batch size after a GPU ran out of memory; None for the script's own size."""


class TrainedPart(NamedTuple):
    """Consecutive steps that the same ranks trained."""

    start: int
    """Step of the checkpoint that it started from; 0 if it started from the beginning."""
    shape: RankShape
    attempts: tuple[int, ...]


class TrainingRecord:
    """The record of a run. Files are read on first use."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.steps: dict[int, dict[str, Any]] = {}
        """Metrics by step; the last line of a step counts."""
        self._logged_attempts: dict[int, int] = {}
        for record in read_records(run.metrics, StepRecord):
            # Without metrics, the line shows only that a step was completed.
            if record.metrics:
                epoch = {} if record.epoch is None else {"epoch": record.epoch}
                self.steps[record.step] = {**record.metrics, **epoch}
                self._logged_attempts[record.step] = record.attempt

    @cached_property
    def events(self) -> list[Event]:
        return list(self.run.read_events())

    @cached_property
    def environments(self) -> dict[int, dict[str, Any]]:
        """The environment by attempt. Later lines of an attempt add or replace fields."""
        environments: dict[int, dict[str, Any]] = {}
        for line in read_json_lines(self.run.environment):
            environments.setdefault(int(line.get("attempt", 0)), {}).update(line)
        return environments

    @cached_property
    def rollbacks(self) -> dict[int, Event]:
        """The events of the steps that the loss guard excluded by a rollback, by step."""
        bad_losses = [event for event in self.events if event.kind == "bad_loss"]
        return {event.step: event for event in bad_losses if event.step and event.action == "rollback"}

    @cached_property
    def unscheduled_saves(self) -> list[int]:
        """Steps that the `Trainer` saved in addition to the multiples of `checkpoint_every`."""
        settings = [line.get("settings") for line in self.environments.values()]
        newest = next((entry for entry in reversed(settings) if isinstance(entry, dict)), {})
        if "checkpoint_every" not in newest:
            return []
        interval = newest["checkpoint_every"]
        steps: list[int] = []
        for event in self.events:
            if event.kind == "resumed":
                steps = [step for step in steps if step <= (event.step or 0)]
            elif event.kind == "checkpoint" and event.step is not None:
                steps.append(event.step)
        return sorted({step for step in steps if not (isinstance(interval, int) and step % interval == 0)})

    @cached_property
    def earlier_ends(self) -> set[int]:
        """Steps after which the run was complete, until it was submitted again with more steps."""
        steps: set[int] = set()
        is_complete = False
        for event in self.events:
            if event.kind == "resumed" and is_complete:
                steps.add(event.step or 0)
            if event.kind in ("finished", "resumed"):
                is_complete = event.state == "COMPLETED"
        return steps

    @cached_property
    def parts(self) -> tuple[TrainedPart, ...]:
        logged = set(self._logged_attempts.values())
        started: dict[int, Event] = {}
        segments: list[TrainedPart] = []
        micro_batch_size: int | None = None
        for event in self.events:
            attempt = event.attempt
            start: int | None = None
            if event.kind == "started":
                started[attempt] = event
                if attempt in logged and not self._begins_with_resume(attempt):
                    start = 0
            elif event.kind == "resumed" and attempt in started:
                start = event.step or 0
            elif event.kind == "failure":
                micro_batch_size = event.micro_batch_size or micro_batch_size
            if start is None:
                continue
            # An attempt trains all steps after its start again.
            segments = [segment for segment in segments if segment.start < start]
            nodes, world_size = started[attempt].nodes or 1, started[attempt].world_size or 1
            shape = RankShape(nodes, world_size, micro_batch_size)
            attempts: tuple[int, ...] = (attempt,)
            if segments and segments[-1].shape == shape:
                start, _, earlier = segments.pop()
                attempts = (*earlier, attempt)
            segments.append(TrainedPart(start, shape, attempts))
        return tuple(segments)

    def _begins_with_resume(self, attempt: int) -> bool:
        """Return true if an attempt began by loading a checkpoint. A rollback loads one later."""
        kinds = [event.kind for event in self.events if event.attempt == attempt]
        return next((kind for kind in kinds if kind in _TRAINING_EVENTS), None) == "resumed"

    @cached_property
    def samples(self) -> dict[int, dict[int, list[int]]]:
        """Sample indices by step and rank; the last attempt of a step counts."""
        latest: dict[int, tuple[int, dict[int, list[int]]]] = {}
        folder = self.run.samples(0, 0).parent
        for match in filter(None, map(_SAMPLES_FILE.fullmatch, sorted(self.run.storage.names(folder)))):
            attempt, rank = int(match[1]), int(match[2])
            for trained in read_records(folder / match[0], TrainedSamples):
                latest_attempt, ranks = latest.get(trained.step, (attempt, {}))
                if attempt > latest_attempt:
                    ranks = {}
                if attempt >= latest_attempt:
                    latest[trained.step] = attempt, {**ranks, rank: trained.indices}
        # The samples of an excluded step were trained only before the rollback.
        return {step: ranks for step, (_, ranks) in latest.items() if step not in self.rollbacks}


class ReplayedPart(NamedTuple):
    last: int
    shape: RankShape
    saved: tuple[int, ...]
    """Steps whose states are saved, ascending; ends with `last`."""
    synced: tuple[int, ...]
    """Further steps that the run saved, ascending."""


@dataclass(frozen=True)
class VerificationPlan:
    """Steps `start` + 1 to `last`, and the recorded state to compare."""

    start: int
    last: int
    start_checkpoint: Path | None
    """Checkpoint to start from; None starts from the beginning."""
    checkpoint: tuple[int, Path] | None
    """Step and folder of the recorded state to compare."""
    parts: tuple[ReplayedPart, ...]
    attempts: tuple[int, ...]
    """Recorded attempts that trained these steps."""
    recorded_ranks: tuple[int, ...]
    """Numbers of ranks in the record, by part."""
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> range:
        return range(self.start + 1, self.last + 1)


def plan_verification(
    record: TrainingRecord, first_step: int | None, last_step: int | None, num_ranks: int | None
) -> VerificationPlan:
    """Choose the start, the state to compare, and the ranks. None chooses the values of the record."""
    name = record.run.run_id
    if not record.steps or not record.parts:
        raise SpecError(
            f"Run {name} recorded no step metrics, so there is nothing to compare. Verification "
            "requires a script with the Trainer or session(), or one that calls log_metrics() and uses the "
            "Checkpointer."
        )
    if not any(event.kind == "checkpoint" and event.step is not None for event in record.events):
        raise SpecError(
            f"Run {name} recorded metrics, but no hpctrain checkpoint, so its state cannot be compared. "
            "Use the Trainer, session() or the Checkpointer in the script."
        )
    checkpoints = {checkpoint.step: checkpoint.path for checkpoint in list_checkpoints(record.run)[0]}
    newest, origin = max(record.steps), record.parts[0].start
    first_step, last_step = first_step or origin + 1, last_step or newest
    if not origin < first_step <= last_step <= newest:
        raise SpecError(
            f"--steps is {first_step}:{last_step}, but run {name} recorded only steps "
            f"{origin + 1}:{newest}. Choose steps in this range."
        )
    ranges = [f"{step + 1}:{newest}" for step in sorted(checkpoints) if step < newest]
    advice = f"To start from a checkpoint, use --steps {join_or(ranges)}." if ranges else ""
    start = max((step for step in checkpoints if step < first_step), default=0)
    if start < origin:
        raise SpecError(
            f"Run {name} began with an imported checkpoint of step {origin}, which no longer exists, so "
            f"these steps cannot be trained again. {advice}".rstrip()
        )
    notes = []
    if start == 0 and first_step > 1:
        notes.append(
            f"No checkpoint before step {first_step} is left, so training starts at step 1. {advice}"
        )
    state = max((step for step in checkpoints if start < step <= last_step), default=None)
    if state is None:
        notes.append(f"No checkpoint of steps {start + 1}:{last_step} is left, so the state is not compared.")
    ends = [*(segment.start for segment in record.parts[1:]), newest]
    trained = [
        (segment, min(end, last_step))
        for segment, end in zip(record.parts, ends, strict=True)
        if end > start and segment.start < last_step
    ]
    replayed = [(segment.shape, end) for segment, end in trained]
    if num_ranks is not None:
        replayed = [(RankShape(1, num_ranks), trained[-1][1])]
    segments, begin = [], 0
    for shape, end in replayed:
        saved = {end} | ({state} if state is not None and begin < state <= end else set())
        synced = tuple(step for step in record.unscheduled_saves if begin < step < end)
        segments.append(ReplayedPart(end, shape, tuple(sorted(saved)), synced))
        begin = end
    return VerificationPlan(
        start,
        last_step,
        checkpoints.get(start),
        None if state is None else (state, checkpoints[state]),
        tuple(segments),
        tuple(attempt for segment, _ in trained for attempt in segment.attempts),
        tuple(segment.shape.world_size for segment, _ in trained),
        tuple(notes),
    )
