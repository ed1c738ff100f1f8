"""Plan a verification: the steps to train again, their start, and the ranks of each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.errors import SpecError
from hpctrain.jobs.verify.training_record import TrainedPart, TrainingRecord
from hpctrain.text import join_or


@dataclass(frozen=True)
class ReplayedPart:
    """Steps that the same ranks train again."""

    last: int
    nodes: int
    world_size: int
    micro_batch_size: int | None
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
    record: TrainingRecord, first: int | None, last: int | None, num_ranks: int | None
) -> VerificationPlan:
    """Choose the start, the state to compare, and the ranks. None chooses the values of the record.

    Raises:
        SpecError: the run recorded too little, or does not have these steps.
    """
    name = record.run.run_id
    if not record.steps or not record.parts:
        raise SpecError(
            f"Run {name} recorded no step metrics, so there is nothing to compare. Verification "
            "requires a script with the Trainer or session(), or one that calls log_metrics() and uses the "
            "Checkpointer."
        )
    if not any(event["kind"] == "checkpoint" and event.get("step") is not None for event in record.events):
        raise SpecError(
            f"Run {name} recorded metrics, but no hpctrain checkpoint, so its state cannot be compared. "
            "Use the Trainer, session() or the Checkpointer in the script."
        )
    checkpoints = {checkpoint.step: checkpoint.path for checkpoint in list_checkpoints(record.run)[0]}
    newest, origin = max(record.steps), record.parts[0].start
    first, last = first or origin + 1, last or newest
    if not origin < first <= last <= newest:
        raise SpecError(
            f"--steps is {first}:{last}, but run {name} recorded only steps "
            f"{origin + 1}:{newest}. Choose steps in this range."
        )
    ranges = [f"{step + 1}:{newest}" for step in sorted(checkpoints) if step < newest]
    advice = f"To start from a checkpoint, use --steps {join_or(ranges)}." if ranges else ""
    start = max((step for step in checkpoints if step < first), default=0)
    if start < origin:
        raise SpecError(
            f"Run {name} began with an imported checkpoint of step {origin}, which no longer exists, so "
            f"these steps cannot be trained again. {advice}".rstrip()
        )
    notes = []
    if start == 0 and first > 1:
        notes.append(f"No checkpoint before step {first} is left, so training starts at step 1. {advice}")
    state = max((step for step in checkpoints if start < step <= last), default=None)
    if state is None:
        notes.append(f"No checkpoint of steps {start + 1}:{last} is left, so the state is not compared.")
    ends = [part.start for part in record.parts[1:]] + [last]
    trained = [
        (part, min(end, last))
        for part, end in zip(record.parts, ends, strict=True)
        if end > start and part.start < last
    ]
    return VerificationPlan(
        start,
        last,
        checkpoints.get(start),
        None if state is None else (state, checkpoints[state]),
        tuple(_replay(trained, num_ranks, state, record.unscheduled_saves)),
        tuple(attempt for part, _ in trained for attempt in part.attempts),
        tuple(part.world_size for part, _ in trained),
        tuple(notes),
    )


def _replay(
    trained: list[tuple[TrainedPart, int]], num_ranks: int | None, state: int | None, saves: Sequence[int]
) -> Iterator[ReplayedPart]:
    begin = 0
    if num_ranks is not None:
        trained = [(TrainedPart(0, 1, num_ranks, ()), trained[-1][1])]
    for part, end in trained:
        saved = {end} | ({state} if state is not None and begin < state <= end else set())
        synced = tuple(step for step in saves if begin < step < end)
        yield ReplayedPart(end, *part.shape, tuple(sorted(saved)), synced)
        begin = end
