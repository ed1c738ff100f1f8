"""Verification of a run: train steps again, and compare losses, samples and state with the record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.manifest import TENSORS_NAME, Manifest
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.errors import CheckpointError, SpecError
from hpctrain.files import read_regular
from hpctrain.jobs.verify.compare_records import (
    RecordDifference,
    abbreviate_indices,
    compare_metrics,
    compare_samples,
    extra_validations,
)
from hpctrain.jobs.verify.find_causes import compare_environments
from hpctrain.jobs.verify.scratch_run import ScratchRun
from hpctrain.jobs.verify.training_record import TrainingRecord
from hpctrain.jobs.verify.verification_plan import VerificationPlan, plan_verification
from hpctrain.rundir import RunDir
from hpctrain.spec.job_spec import BackendName
from hpctrain.telemetry.sampling.nvml import count_gpus
from hpctrain.text import format_duration, format_ranks, format_size, pluralize

if TYPE_CHECKING:
    from hpctrain.checkpoint.convert.compare_checkpoints import StateComparison, StateDifference

#: Maximum number of tensors in a message.
_MAX_TENSORS = 8
_OTHER_GENERATOR = re.compile(r"rank-\d+/(python|numpy)")
#: Entries of the state that metrics.jsonl contains, or that depend on the time of the stop or the memory of
#: the GPU.
_NOT_COMPARED = ("latest", "validation", "validated_step", "micro_batches")
#: Recorded versions, which are compared as facts, not as results.
_OF_ENVIRONMENT = ("determinism/torch", "determinism/device")


@dataclass
class VerificationResult:
    """Result of a verification."""

    plan: VerificationPlan
    steps: list[int] = field(default_factory=list)
    """Steps whose metrics were compared."""
    sample_steps: list[int] = field(default_factory=list)
    """Steps whose samples were compared."""
    metrics: list[RecordDifference] = field(default_factory=list)
    samples: list[RecordDifference] = field(default_factory=list)
    state: StateComparison | None = None
    """None if there is no checkpoint to compare."""
    damaged: list[str] = field(default_factory=list)
    """A message per damaged file of the recorded checkpoints."""
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    """The folder of the repeated steps, if it was kept."""

    @property
    def identical(self) -> bool:
        """True if something was compared, and all of it is identical."""
        state = self.state is not None and bool(self.state.differences)
        return self.compared and not (self.metrics or self.samples or self.damaged or state)

    @property
    def compared(self) -> bool:
        """True if a metric, a sample or a state was compared."""
        return bool(self.steps or self.sample_steps) or self.state is not None

    @property
    def first_step(self) -> int | None:
        """The first step with a difference; None if there is none."""
        steps = [one.step for one in (*self.metrics, *self.samples)]
        if self.state is not None and self.state.differences and self.plan.checkpoint is not None:
            steps.append(self.plan.checkpoint[0])
        return min(steps, default=None)


def verify_run(
    run: RunDir,
    environ: Mapping[str, str],
    *,
    first: int | None = None,
    last: int | None = None,
    num_ranks: int | None = None,
    ignored_metrics: Collection[str] = (),
    backend: BackendName = "local",
    parent: Path | None = None,
    keep: bool = False,
    report: Callable[[str], object],
) -> VerificationResult:
    """Train steps of a run again, and compare with its record. The run is not changed.

    Args:
        run: the run.
        environ: environment variables for the training.
        first: first step to verify; None for the first step of the run.
        last: last step; None for the last recorded step.
        num_ranks: number of ranks; None for that of the record.
        ignored_metrics: metrics to skip, such as durations.
        backend: the backend for the training.
        parent: parent of the folder for the repeated steps; see `ScratchRun`.
        keep: keep the folder of the repeated steps.
        report: receives messages on the progress.

    Raises:
        SpecError: the run, or these steps, cannot be verified here, or there is nothing to compare.
        RunFailed: the steps could not be repeated.
    """
    record = TrainingRecord(run)
    plan = plan_verification(record, first, last, num_ranks)
    comparable = _comparable_steps(record, ignored_metrics)
    if not any(plan.start < step <= plan.last for step in comparable):
        raise _nothing_compared(plan, record, comparable)
    with ScratchRun(run, environ, backend, parent, keep=keep) as scratch:
        try:
            scratch.check(plan)
        except SpecError:
            if num_ranks is not None or not record.is_elastic_deterministic:
                raise
            # Any number of ranks has the same result.
            plan = plan_verification(record, first, last, count_gpus(environ) or 1)
        result = VerificationResult(plan, notes=[*plan.notes, *_describe_retrained(record), *scratch.notes])
        result.folder = scratch.run.path if keep else None
        start_problems = [] if plan.start_checkpoint is None else list(_damage(plan.start_checkpoint))
        state_problems = [] if plan.checkpoint is None else list(_damage(plan.checkpoint[1]))
        result.damaged = start_problems + state_problems
        if start_problems:
            result.causes.append(
                f"the checkpoint of step {plan.start} is damaged, so the steps after it were not repeated. "
                "Use --steps to start from another checkpoint"
            )
            return result
        report(_describe(plan, record, scratch))
        scratch.train(plan, record)
        _compare(result, record, TrainingRecord(scratch.run), scratch, ignored_metrics)
    if plan.checkpoint is not None and not (result.compared or result.damaged):
        others = [step for step in comparable if step != plan.checkpoint[0]]
        raise _nothing_compared(plan, record, others, unsaved=plan.checkpoint[0])
    return result


def _metric_steps(record: TrainingRecord, ignored: Collection[str]) -> list[int]:
    return [step for step, values in record.steps.items() if values.keys() - {"epoch", *ignored}]


def _comparable_steps(record: TrainingRecord, ignored_metrics: Collection[str]) -> list[int]:
    """Return the steps with metrics, samples or state to compare, ascending."""
    states = (one.step for one in list_checkpoints(record.run)[0])
    found = {*_metric_steps(record, ignored_metrics), *record.samples, *states}
    return sorted(step for step in found if record.parts[0].start < step <= max(record.steps))


def _nothing_compared(
    plan: VerificationPlan, record: TrainingRecord, others: Sequence[int], unsaved: int | None = None
) -> SpecError:
    state = (
        "no checkpoint of these steps is left"
        if unsaved is None
        else f"the script did not save the state after step {unsaved} this time"
    )
    advice = (
        f"Include a step that can be compared in --steps: {format_ranks(others, 'step')}."
        if others
        else "No other step of this run can be compared, unless fewer metrics are ignored."
    )
    return SpecError(
        f"There is nothing to compare in steps {plan.start + 1}:{plan.last}: run {record.run.run_id} "
        f"recorded no samples and no metrics (other than those excluded with --ignore), and {state}. {advice}"
    )


def _describe_retrained(record: TrainingRecord) -> list[str]:
    if not record.retrained:
        return []
    count = len({one.step for one in record.retrained})
    others = "" if count == 1 else f" This applies to {count} steps."
    return [f"{record.retrained[0]}. The later one counts.{others}"]


def _describe(plan: VerificationPlan, record: TrainingRecord, scratch: ScratchRun) -> str:
    seconds = sum(record.seconds.get(step, 0.0) for step in range(plan.start + 1, plan.last + 1))
    ranks = ", then ".join(pluralize(part.world_size, "rank") for part in plan.parts)
    start = "from the beginning" if plan.start_checkpoint is None else f"from {plan.start_checkpoint}"
    return (
        f"Training steps {plan.start + 1}:{plan.last} again, {start}, on {ranks}, in {scratch.run}. "
        f"The run needed {format_duration(seconds)} for these steps."
    )


def _compare(
    result: VerificationResult,
    record: TrainingRecord,
    here: TrainingRecord,
    scratch: ScratchRun,
    ignored_metrics: Collection[str],
) -> None:
    plan = result.plan
    steps = range(plan.start + 1, plan.last + 1)
    result.steps = sorted(set(steps).intersection(_metric_steps(record, ignored_metrics)))
    result.sample_steps = [step for step in steps if step in record.samples]
    result.metrics = list(compare_metrics(record, here, result.steps, ignored_metrics))
    result.samples = list(compare_samples(record, here, result.sample_steps))
    for step, names in extra_validations(record, here).items():
        result.notes.append(
            f"The run was complete after step {step}, and was then extended. This step's {', '.join(names)} "
            "could not be compared, because the extended run does not end there."
        )
    if plan.checkpoint is not None:
        step, recorded = plan.checkpoint
        if (own := scratch.checkpoint(step)).is_dir():
            # Imports torch.
            from hpctrain.checkpoint.convert.compare_checkpoints import compare_checkpoints

            try:
                result.state = compare_checkpoints(recorded, own, ignored=_NOT_COMPARED)
            except CheckpointError as error:
                if not result.damaged:
                    result.damaged.append(str(error))
            else:
                result.notes += _set_aside_unseeded(result.state)
                differences = result.state.differences
                result.state.differences = [one for one in differences if one.name not in _OF_ENVIRONMENT]
        else:
            result.notes.append(
                f"The script did not save the state after step {step} this time, so that state is not "
                "compared."
            )
    environments = [record.environments[one] for one in plan.attempts if one in record.environments]
    facts = compare_environments(environments, here.environments.values())
    if result.identical:
        result.notes += [f"No effect on the result: {fact}" for fact in facts]
    else:
        result.causes = list(_find_causes(result, record, facts))


def _set_aside_unseeded(state: StateComparison) -> list[str]:
    """Remove the states of Python's and NumPy's generators, which only some scripts seed; return a note."""
    unseeded = [one for one in state.differences if _OTHER_GENERATOR.match(one.name)]
    state.differences = [one for one in state.differences if one not in unseeded]
    note = (
        "The states of Python's or NumPy's random generators differ, as usual if a script does not seed "
        "them. This has no effect if the script does not use them."
    )
    return [note] if unseeded else []


def _find_causes(result: VerificationResult, record: TrainingRecord, facts: list[str]) -> Iterator[str]:
    differences = [] if result.state is None else result.state.differences
    settings = [one for one in differences if "/param_groups/" in one.name]
    if result.damaged and not (result.metrics or result.samples):
        yield "a file of the recorded checkpoint has changed since it was written"
        return
    yield from (f"optimizer: {one.name} is {one.recorded} in the record, {one.here} here" for one in settings)
    yield from (
        f"data: {one.name} is {one.recorded} in the record, {one.here} here"
        for one in differences
        if one.name.startswith("plan/")
    )
    yield from facts
    if not result.plan.same_ranks and not record.is_elastic_deterministic:
        yield "without elastic_determinism, results on a different number of ranks agree only up to rounding"
    if not facts and not settings:
        yield from _guess(result, record)


def _guess(result: VerificationResult, record: TrainingRecord) -> Iterator[str]:
    """Yield a cause that the differences themselves show, if all recorded facts are equal."""
    plan, state = result.plan, result.state
    if result.steps and not result.metrics and not result.samples:
        assert plan.checkpoint is not None
        one_bit = state is not None and len(state.differences) == 1 and state.differences[0].bit is not None
        yield (
            f"{'a single bit differs and ' if one_bit else ''}all metrics are identical, so the recorded "
            f"state of step {plan.checkpoint[0]} changed after it was computed: in memory, during the save, "
            f"or in its file"
        )
        return
    step = result.first_step
    if plan.start_checkpoint is not None and step == min(result.steps, default=None):
        yield f"the first step after the checkpoint of step {plan.start} differs: its state may have changed"
    samples = record.samples.get(step or 0, {})
    listed = "; ".join(
        f"{format_ranks([rank])}: {abbreviate_indices(samples[rank])}" for rank in sorted(samples)
    )
    used = f" (samples of step {step}: {listed})" if listed else ""
    yield (
        f"all recorded facts are equal, so the data{used} "
        "or files outside the code snapshot have changed, the hardware is faulty, or the script is not "
        "deterministic. Verify again: if the first difference moves, the script is not deterministic"
    )


def _damage(checkpoint: Path) -> Iterator[str]:
    """Yield a message per damaged file, with the tensors that it contains."""
    try:
        files = Manifest.read(checkpoint).files
    except CheckpointError as error:
        yield str(error)
        return
    for entry in files:
        try:
            entry.verify(checkpoint)
        except CheckpointError as error:
            tensors = _tensors_in(checkpoint, entry.name)
            shown = ", ".join(tensors[:_MAX_TENSORS]) + (", …" if len(tensors) > _MAX_TENSORS else "")
            yield (
                f"{error} It contains {pluralize(len(tensors), 'tensor')}: {shown}" if tensors else str(error)
            )


def _tensors_in(checkpoint: Path, file: str) -> list[str]:
    """Return the names of the tensors with a part in a file of a checkpoint."""
    try:
        table = json.loads(read_regular(checkpoint / TENSORS_NAME))
        found = [key for key, entry in table.items() if any(file in piece for piece in entry["pieces"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [key.removeprefix("state/") for key in found]


def describe_result(result: VerificationResult) -> Iterator[str]:
    """Yield the lines of the output."""
    plan = result.plan
    yield from (f"note         {note}" for note in result.notes)
    if result.identical:
        yield "identical to the last bit"
    else:
        at = "" if result.first_step is None else f": the first difference is in step {result.first_step}"
        yield f"not identical{at}"
        yield from (f"damaged      {message}" for message in result.damaged)
        for title, found in (("metrics", result.metrics), ("samples", result.samples)):
            if found:
                count = len({one.step for one in found})
                where = f"{pluralize(count, 'step')}, first in step {found[0].step}"
                yield f"{title:<12} differ in {where}: {found[0]}"
        if result.state is not None and result.state.differences and plan.checkpoint is not None:
            where = (
                f"of step {plan.checkpoint[0]} differs in {pluralize(len(result.state.differences), 'place')}"
            )
            first = describe_state_difference(result.state.differences[0])
            yield f"state        {where}, first {first}"
        yield from (f"cause        {cause}" for cause in result.causes)
    yield f"compared     {describe_compared(result)}"
    if result.folder is not None:
        yield f"folder       {result.folder}"


def describe_compared(result: VerificationResult) -> str:
    """Return the extent of the comparison."""
    parts = []
    if result.steps:
        names = f"steps {result.plan.start + 1}:{result.plan.last}"
        parts.append(f"metrics of {pluralize(len(result.steps), 'step')} ({names})")
    if result.sample_steps:
        parts.append(f"samples of {pluralize(len(result.sample_steps), 'step')}")
    if result.state is not None and result.plan.checkpoint is not None:
        parts.append(
            f"state after step {result.plan.checkpoint[0]} ({pluralize(result.state.num_tensors, 'tensor')} "
            f"of {format_size(result.state.num_bytes)}, {pluralize(result.state.num_values, 'value')})"
        )
    return "; ".join(parts) or "nothing"


def describe_state_difference(one: StateDifference) -> str:
    """Return a sentence about a tensor or value."""
    place = f"[{', '.join(map(str, one.index))}]" if one.index else ""
    text = f"{one.name}{place}: {one.recorded!r} in the record, {one.here!r} here"
    if one.num_elements:
        text += f" ({one.num_different} of {pluralize(one.num_elements, 'element')} differ"
        text += f"; only bit {one.bit}" if one.bit is not None else ""
        text += f"; stored by rank {one.rank})" if one.rank is not None else ")"
    return text


def result_record(result: VerificationResult) -> dict[str, Any]:
    """Return the result as plain values, for `--json`."""
    plan, state = result.plan, result.state
    return {
        "identical": result.identical,
        "first_step": plan.start + 1,
        "last_step": plan.last,
        "start_checkpoint": plan.start_checkpoint and str(plan.start_checkpoint),
        "ranks": [part.world_size for part in plan.parts],
        "recorded_ranks": list(plan.recorded_ranks),
        "steps_compared": len(result.steps),
        "steps_with_samples_compared": len(result.sample_steps),
        "state": None
        if state is None or plan.checkpoint is None
        else {
            "step": plan.checkpoint[0],
            "tensors": state.num_tensors,
            "bytes": state.num_bytes,
            "values": state.num_values,
            "differences": [vars(one) for one in state.differences],
        },
        "first_difference": result.first_step,
        "metrics": [vars(one) for one in result.metrics],
        "samples": [vars(one) for one in result.samples],
        "damaged": result.damaged,
        "causes": result.causes,
        "notes": result.notes,
        "folder": result.folder and str(result.folder),
    }
