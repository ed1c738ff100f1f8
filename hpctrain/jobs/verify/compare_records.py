"""Comparison of the metrics and samples of two records of the same steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.verify.training_record import TrainingRecord, same_number

#: Stands for a value that only the other record has.
_MISSING = "(missing)"
#: Maximum number of samples in a message.
_MAX_SHOWN = 16


@dataclass(frozen=True)
class RecordDifference:
    """A metric or sample of a step that differs."""

    step: int
    name: str
    recorded: Any
    here: Any
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.name}{rank}: {_show(self.recorded)} in the record, {_show(self.here)} here"


def compare_metrics(
    recorded: TrainingRecord, here: TrainingRecord, steps: Sequence[int], ignored: Collection[str]
) -> Iterator[RecordDifference]:
    """Yield the differing metrics of each step, the loss first.

    Metrics that only `here` has are skipped, and so are those of the `extra_validations` of the record.
    """
    extra = extra_validations(recorded, here)
    for step in steps:
        values, others = recorded.steps[step], here.steps.get(step, {})
        names = values.keys() - set(ignored) - set(extra.get(step, ()))
        for name in sorted(names, key=lambda name: (name != "loss", name)):
            other = others.get(name, _MISSING)
            if not same_number(values[name], other):
                yield RecordDifference(step, name, values[name], other)


def extra_validations(recorded: TrainingRecord, here: TrainingRecord) -> dict[int, list[str]]:
    """Return the metrics of validations at earlier ends of the run, which `here` does not repeat, by step."""
    both = (step for step in recorded.earlier_ends if step in recorded.steps and step in here.steps)
    names = {step: sorted(recorded.steps[step].keys() - here.steps[step].keys()) for step in both}
    return {step: metrics for step, metrics in names.items() if metrics}


def compare_samples(
    recorded: TrainingRecord, here: TrainingRecord, steps: Sequence[int]
) -> Iterator[RecordDifference]:
    """Yield the differing sample indices of each step: by rank, or of all ranks if their numbers differ."""
    for step in steps:
        values, others = recorded.samples[step], here.samples.get(step, {})
        if values.keys() == others.keys():
            for rank in sorted(values):
                if values[rank] != others[rank]:
                    yield RecordDifference(step, "samples", values[rank], others[rank], rank)
        elif _all(values) != _all(others):
            yield RecordDifference(step, "samples", _all(values), _all(others))


def _all(ranks: Mapping[int, Sequence[int]]) -> list[int]:
    return sorted(index for indices in ranks.values() for index in indices)


def abbreviate_indices(indices: Sequence[int]) -> str:
    """Return the first samples of a list."""
    return ", ".join(map(str, indices[:_MAX_SHOWN])) + (", …" if len(indices) > _MAX_SHOWN else "")


def _show(value: object) -> str:
    return abbreviate_indices(value) if isinstance(value, list) else repr(value)
