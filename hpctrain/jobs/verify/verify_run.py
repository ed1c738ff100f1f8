"""Train steps of a run again, and compare losses, samples and state with its record."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.checkpoint.format.manifest import Manifest
from hpctrain.errors import CheckpointError, SpecError
from hpctrain.jobs.verify.scratch_run import ScratchRun
from hpctrain.jobs.verify.training_record import TrainingRecord, VerificationPlan, plan_verification
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.rundir import RunDir
from hpctrain.text import format_size, pluralize

if TYPE_CHECKING:
    from hpctrain.checkpoint.convert.compare_checkpoints import StateComparison, StateDifference

#: Stands for a value that only the other record has.
_MISSING = "(missing)"
#: States of generators that only some scripts seed.
_UNSEEDED_GENERATOR = re.compile(r"rank-\d+/(python|numpy)")
#: Entries of the state that metrics.jsonl contains, or that depend on the time of the stop or the memory of
#: the GPU.
_NOT_COMPARED = ("latest", "validation", "validated_step", "micro_batches")
#: Recorded versions, which are compared as facts, not as results.
_VERSIONS = ("determinism/torch", "determinism/device")
#: Facts of an environment, in the order of the output, with their names for the user.
_FACTS = {
    "args": "arguments of the script",
    "torch": "PyTorch",
    "hpctrain": "hpctrain",
    "python": "Python",
    "gpu": "GPU model",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "cpu": "CPU model",
    "world_size": "number of ranks",
    "threads_per_rank": "threads per rank",
    "deterministic_algorithms": "deterministic algorithms of PyTorch",
}


@dataclass(frozen=True)
class RecordDifference:
    step: int
    name: str
    recorded: Any
    here: Any
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        recorded, repeated = (
            reprlib.repr(value)[1:-1] if isinstance(value, list) else repr(value)
            for value in (self.recorded, self.here)
        )
        return f"{self.name}{rank}: {recorded} in the record, {repeated} here"


@dataclass
class VerificationResult:
    plan: VerificationPlan
    steps: list[int] = field(default_factory=list)
    """Steps whose metrics were compared."""
    sample_steps: list[int] = field(default_factory=list)
    metrics: list[RecordDifference] = field(default_factory=list)
    samples: list[RecordDifference] = field(default_factory=list)
    state: StateComparison | None = None
    """None if there is no checkpoint to compare."""
    damaged: list[str] = field(default_factory=list)
    """A message per damaged file of the recorded checkpoints."""
    causes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def compared(self) -> bool:
        return bool(self.steps or self.sample_steps) or self.state is not None

    @property
    def identical(self) -> bool:
        """True if something was compared, and all of it is identical."""
        return self.compared and self.first_step is None and not self.damaged

    @property
    def first_step(self) -> int | None:
        steps = [difference.step for difference in (*self.metrics, *self.samples)]
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
    report: Callable[[str], object],
) -> VerificationResult:
    """Train steps of a run again, and compare with its record. The run is not changed."""
    record = TrainingRecord(run)
    plan = plan_verification(record, first, last, num_ranks)
    result = VerificationResult(plan)
    skipped = {"epoch", *ignored_metrics}
    result.steps = [step for step in plan.steps if record.steps.get(step, {}).keys() - skipped]
    result.sample_steps = [step for step in plan.steps if step in record.samples]
    nothing_compared = SpecError(
        f"There is nothing to compare in steps {plan.start + 1}:{plan.last}: run {run.run_id} recorded no "
        "samples and no metrics (other than those excluded with --ignore) of these steps, and no state that "
        "is saved again. Choose other steps with --steps."
    )
    if not (result.steps or result.sample_steps or plan.checkpoint):
        raise nothing_compared
    with ScratchRun(run, environ, backend, parent) as scratch:
        scratch.check(plan)
        result.notes = [*plan.notes, *scratch.notes]
        if plan.start_checkpoint is not None and (damaged := list(_damage(plan.start_checkpoint))):
            result.steps, result.sample_steps, result.damaged = [], [], damaged
            result.causes.append(
                f"the checkpoint of step {plan.start} is damaged, so the steps after it were not repeated. "
                "Use --steps to start from another checkpoint"
            )
            return result
        ranks = ", then ".join(pluralize(segment.shape.world_size, "rank") for segment in plan.parts)
        start = plan.start_checkpoint or "the beginning"
        report(
            f"Training steps {plan.start + 1}:{plan.last} again, from {start}, on {ranks}, in {scratch.run}."
        )
        scratch.train(plan, record)
        repeated = TrainingRecord(scratch.run)
        result.metrics = list(compare_metrics(record, repeated, result.steps, skipped))
        result.samples = list(compare_samples(record, repeated, result.sample_steps))
        if plan.checkpoint is not None:
            _compare_state(result, plan.checkpoint[1], scratch.run.checkpoint(plan.checkpoint[0]))
        recorded = [record.environments[n] for n in plan.attempts if n in record.environments]
        facts = compare_environments(recorded, repeated.environments.values())
    if not (result.compared or result.damaged):
        raise nothing_compared
    if result.identical:
        result.notes += (f"No effect on the result: {fact}" for fact in facts)
    else:
        result.causes = facts
    return result


def compare_metrics(
    recorded: TrainingRecord, repeated_record: TrainingRecord, steps: Iterable[int], ignored: Collection[str]
) -> Iterator[RecordDifference]:
    """Yield the differing metrics of each step, the loss first, without those of the repetition only."""
    for step in steps:
        values, repeated = recorded.steps[step], repeated_record.steps.get(step, {})
        names = values.keys() - set(ignored)
        if step in recorded.earlier_ends and repeated:
            names &= repeated.keys()
        for name in sorted(names, key=lambda name: (name != "loss", name)):
            value, counterpart = values[name], repeated.get(name, _MISSING)
            is_nan = value != value and counterpart != counterpart
            if value != counterpart and not is_nan:
                yield RecordDifference(step, name, value, counterpart)


def compare_samples(
    recorded: TrainingRecord, repeated_record: TrainingRecord, steps: Iterable[int]
) -> Iterator[RecordDifference]:
    """Yield the differing sample indices of each step: by rank, or of all ranks if their numbers differ."""
    for step in steps:
        ranks, repeated = recorded.samples[step], repeated_record.samples.get(step, {})
        if ranks.keys() == repeated.keys():
            for rank in sorted(ranks):
                if ranks[rank] != repeated[rank]:
                    yield RecordDifference(step, "samples", ranks[rank], repeated[rank], rank)
            continue
        union, union_here = (sorted(chain(*by_rank.values())) for by_rank in (ranks, repeated))
        if union != union_here:
            yield RecordDifference(step, "samples", union, union_here)


def _compare_state(result: VerificationResult, recorded: Path, repeated: Path) -> None:
    # Imports torch.
    from hpctrain.checkpoint.convert.compare_checkpoints import compare_checkpoints

    result.damaged += _damage(recorded)
    if not repeated.is_dir():
        result.notes.append(
            f"The script did not save {repeated.name} this time, so the state is not compared."
        )
        return
    try:
        state = compare_checkpoints(recorded, repeated, ignored=_NOT_COMPARED)
    except CheckpointError as error:
        result.damaged = result.damaged or [str(error)]
        return
    seeded = [entry for entry in state.differences if not _UNSEEDED_GENERATOR.match(entry.name)]
    if len(seeded) < len(state.differences):
        result.notes.append(
            "The states of Python's or NumPy's random generators differ, as usual if a script does not seed "
            "them. This has no effect if the script does not use them."
        )
    state.differences = [entry for entry in seeded if entry.name not in _VERSIONS]
    result.state = state


def _damage(checkpoint: Path) -> Iterator[str]:
    try:
        files = Manifest.read(checkpoint).files
    except CheckpointError as error:
        yield str(error)
        return
    for entry in files:
        try:
            entry.verify(checkpoint)
        except CheckpointError as error:
            yield str(error)


def compare_environments(
    recorded: Iterable[Mapping[str, Any]], repeated_records: Collection[Mapping[str, Any]]
) -> list[str]:
    """Return a sentence per fact that differs from the most similar environment of the verification."""
    facts: dict[str, None] = {}
    for environment in recorded:
        differences = min(
            (list(_compare_facts(environment, repeated)) for repeated in repeated_records or [{}]), key=len
        )
        facts |= dict.fromkeys(differences)
    return list(facts)


def _compare_facts(recorded: Mapping[str, Any], repeated: Mapping[str, Any]) -> Iterator[str]:
    code, code_here, settings, settings_here = (
        value if isinstance(value := environment.get(name), Mapping) else {}
        for name in ("code", "settings")
        for environment in (recorded, repeated)
    )
    for file, checksum in code.items():
        if file not in code_here:
            yield f"code: {file} was imported in the recorded run, but not here"
        elif checksum != code_here[file]:
            yield f"code: {file} has changed (checksum {checksum} in the record, {code_here[file]} here)"
    for name, value in settings.items():
        # The verification has its own run folder.
        if name != "run_dir" and value != settings_here.get(name):
            yield f"setting {name}: {value!r} in the record, {settings_here.get(name)!r} here"
    for name, title in _FACTS.items():
        if name in recorded and name in repeated and recorded[name] != repeated[name]:
            yield f"{title}: {recorded[name] or 'none'} in the record, {repeated[name] or 'none'} here"


def describe_result(result: VerificationResult) -> Iterator[str]:
    plan, state = result.plan, result.state
    yield from (f"note         {note}" for note in result.notes)
    if result.identical:
        yield "identical to the last bit"
    else:
        at = "" if result.first_step is None else f": the first difference is in step {result.first_step}"
        yield f"not identical{at}"
        yield from (f"damaged      {message}" for message in result.damaged)
        for title, differences in (("metrics", result.metrics), ("samples", result.samples)):
            if differences:
                steps = pluralize(len({difference.step for difference in differences}), "step")
                yield f"{title:<12} differ in {steps}, first in step {differences[0].step}: {differences[0]}"
        if state is not None and state.differences and plan.checkpoint is not None:
            places = pluralize(len(state.differences), "place")
            difference = _describe_state_difference(state.differences[0])
            yield f"state        of step {plan.checkpoint[0]} differs in {places}, first {difference}"
        yield from (f"cause        {cause}" for cause in result.causes)
    compared = []
    if result.steps:
        steps = pluralize(len(result.steps), "step")
        compared.append(f"metrics of {steps} (steps {plan.start + 1}:{plan.last})")
    if result.sample_steps:
        compared.append(f"samples of {pluralize(len(result.sample_steps), 'step')}")
    if state is not None and plan.checkpoint is not None:
        compared.append(
            f"state after step {plan.checkpoint[0]} ({pluralize(state.num_tensors, 'tensor')} "
            f"of {format_size(state.num_bytes)}, {pluralize(state.num_values, 'value')})"
        )
    yield f"compared     {'; '.join(compared) or 'nothing'}"


def _describe_state_difference(difference: StateDifference) -> str:
    index = f"[{', '.join(map(str, difference.index))}]" if difference.index else ""
    text = f"{difference.name}{index}: {difference.recorded!r} in the record, {difference.here!r} here"
    if difference.num_elements:
        elements = pluralize(difference.num_elements, "element")
        text += f" ({difference.num_different} of {elements} differ"
        text += f"; only bit {difference.bit}" if difference.bit is not None else ""
        text += f"; stored by rank {difference.rank})" if difference.rank is not None else ")"
    return text


def result_record(result: VerificationResult) -> dict[str, Any]:
    plan, state = result.plan, result.state
    return {
        "identical": result.identical,
        "first_step": plan.start + 1,
        "last_step": plan.last,
        "start_checkpoint": plan.start_checkpoint and str(plan.start_checkpoint),
        "ranks": [segment.shape.world_size for segment in plan.parts],
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
            "differences": [vars(difference) for difference in state.differences],
        },
        "first_difference": result.first_step,
        "metrics": [vars(difference) for difference in result.metrics],
        "samples": [vars(difference) for difference in result.samples],
        "damaged": result.damaged,
        "causes": result.causes,
        "notes": result.notes,
    }
