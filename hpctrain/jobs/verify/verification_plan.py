"""Plan of a verification: the steps to train again, their start, and the ranks of each part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.errors import SpecError
from hpctrain.jobs.verify.training_record import TrainedPart, TrainingRecord
from hpctrain.text import join_or


@dataclass(frozen=True)
class ReplayedPart:
    """Steps that one number of ranks trains again."""

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
    """Steps `start` + 1 to `last`, and what to compare."""

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
    def same_ranks(self) -> bool:
        """True if each step is trained on the recorded number of ranks."""
        return tuple(part.world_size for part in self.parts) == self.recorded_ranks


def plan_verification(
    record: TrainingRecord, first: int | None, last: int | None, num_ranks: int | None
) -> VerificationPlan:
    """Choose the start, the state to compare, and the ranks.

    Args:
        record: the record of the run.
        first: first step to verify; None for the first step of the run.
        last: last step; None for the last recorded step.
        num_ranks: ranks to train on; None for those of the record.

    Raises:
        SpecError: the run recorded too little, or does not have these steps.
    """
    name = record.run.run_id
    _check_record(record)
    kept = {one.step: one.path for one in list_checkpoints(record.run)[0]}
    newest, origin = max(record.steps), record.parts[0].start
    first, last = first or origin + 1, last or newest
    if not origin < first <= last <= newest:
        raise SpecError(
            f"--steps is {first}:{last}, but run {name} recorded only steps "
            f"{origin + 1}:{newest}. Choose steps in this range."
        )
    start = max((step for step in kept if step < first), default=None)
    if start is None and origin > 0:
        raise SpecError(
            f"Run {name} began with an imported checkpoint of step {origin}, which no longer exists, so "
            f"these steps cannot be trained again. {_describe_kept(kept, newest)}"
        )
    notes = []
    if start is None and first > 1:
        notes.append(
            f"No checkpoint before step {first} is left, so training starts from the beginning. "
            f"{_describe_kept(kept, newest)}"
        )
    begin = start or 0
    state = max((step for step in kept if begin < step <= last), default=None)
    if state is None:
        notes.append(
            f"No checkpoint of steps {begin + 1}:{last} is left, so the state is not compared. "
            f"{_describe_kept(kept, newest)}"
        )
    ends = [part.start for part in record.parts[1:]] + [last]
    replayed = [
        (part, min(end, last))
        for part, end in zip(record.parts, ends, strict=True)
        if end > begin and part.start < last
    ]
    return VerificationPlan(
        begin,
        last,
        None if start is None else kept[start],
        None if state is None else (state, kept[state]),
        tuple(_replay(replayed, num_ranks, state, record.unscheduled_saves)),
        tuple(attempt for part, _ in replayed for attempt in part.attempts),
        tuple(part.world_size for part, _ in replayed),
        tuple(notes),
    )


def _check_record(record: TrainingRecord) -> None:
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


def _replay(
    parts: list[tuple[TrainedPart, int]], num_ranks: int | None, state: int | None, synced: Sequence[int]
) -> Iterator[ReplayedPart]:
    begin, last = 0, parts[-1][1]
    for part, end in parts:
        stop, shape = end, (part.nodes, part.world_size, part.micro_batch_size)
        if num_ranks is not None:
            stop, shape = last, (1, num_ranks, None)
        saved = {stop} | ({state} if state is not None and begin < state <= stop else set())
        yield ReplayedPart(
            stop, *shape, tuple(sorted(saved)), tuple(step for step in synced if begin < step < stop)
        )
        begin = stop
        if stop == last:
            return


def _describe_kept(kept: Mapping[int, Path], newest: int) -> str:
    """Return the steps that can be verified without training from the beginning."""
    starts = [step for step in sorted(kept) if step < newest]
    if not starts:
        return "No earlier checkpoint was kept (keep_last)."
    steps = join_or(f"{step + 1}:{newest}" for step in starts)
    return f"To start from a checkpoint that was kept (keep_last), use --steps {steps}."
