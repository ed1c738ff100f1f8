"""Record of training in a run folder: metrics, samples, environments, and the shape of each part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir, is_metrics
from hpctrain.telemetry.accounting.metric_fields import RESERVED_FIELDS

_SAMPLES_FILE = re.compile(r"attempt-(\d+)-rank-(\d+)\.jsonl")

#: Events that the ranks of an attempt write.
_TRAINING_EVENTS = ("resumed", "checkpoint", "bad_loss")


@dataclass(frozen=True)
class TrainedPart:
    """Consecutive steps that the same ranks trained."""

    start: int
    """Step of the checkpoint that it started from; 0 if it started from the beginning."""
    nodes: int
    world_size: int
    attempts: tuple[int, ...]
    micro_batch_size: int | None = None
    """Maximum micro-batch size after a GPU ran out of memory; None for the script's own size."""

    @property
    def shape(self) -> tuple[int, int, int | None]:
        return self.nodes, self.world_size, self.micro_batch_size


@dataclass(frozen=True)
class RetrainedStep:
    """A step that was trained twice, with different results."""

    step: int
    name: str
    values: tuple[Any, Any]
    attempts: tuple[int, int]

    def __str__(self) -> str:
        one, other = self.attempts
        return (
            f"step {self.step} was trained twice, and {self.name} differs: {self.values[0]!r} in attempt "
            f"{one}, {self.values[1]!r} in attempt {other}"
        )


class TrainingRecord:
    """The record of a run. Files are read on first use.

    Attributes:
        run: the run folder.
        steps: metrics by step; the last line of a step counts.
        retrained: steps whose lines differ.
        seconds: duration of each step.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.steps: dict[int, dict[str, Any]] = {}
        self.retrained: list[RetrainedStep] = []
        self.seconds: dict[int, float] = {}
        self._attempts: dict[int, int] = {}
        for line in read_json_lines(run.metrics, is_metrics):
            values = {name: value for name, value in line.items() if name not in RESERVED_FIELDS - {"epoch"}}
            # Without metrics, the line shows only that a step was completed.
            if "step" in line and values.keys() - {"epoch"}:
                self._add(line, values)

    def _add(self, line: Mapping[str, Any], values: dict[str, Any]) -> None:
        step, attempt = int(line["step"]), int(line.get("attempt", 0))
        before = self.steps.get(step, {})
        for name in before.keys() & values.keys():
            if not same_number(before[name], values[name]):
                pair = before[name], values[name]
                self.retrained.append(RetrainedStep(step, name, pair, (self._attempts[step], attempt)))
        self.steps[step], self._attempts[step] = values, attempt
        spent = line.get("spent")
        seconds = spent.get("all") if isinstance(spent, dict) else None
        self.seconds[step] = seconds if isinstance(seconds, float) else 0.0

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return list(self.run.read_events())

    @cached_property
    def rollbacks(self) -> dict[int, dict[str, Any]]:
        """The events of the steps that the loss guard excluded by a rollback, by step."""
        found = [event for event in self.events if event["kind"] == "bad_loss" and event.get("step")]
        return {event["step"]: event for event in found if event.get("action") == "rollback"}

    @property
    def is_elastic_deterministic(self) -> bool:
        """True if the script requested identical results on any number of ranks."""
        return bool(self.settings.get("elastic_determinism"))

    @property
    def settings(self) -> dict[str, Any]:
        """The newest settings of the `Trainer` or session; empty without them."""
        found = [line.get("settings") for line in self.environments.values()]
        return next((one for one in reversed(found) if isinstance(one, dict)), {})

    @cached_property
    def unscheduled_saves(self) -> list[int]:
        """Steps that the `Trainer` saved in addition to the multiples of `checkpoint_every`.

        Steps that were trained again afterwards are omitted.
        """
        if "checkpoint_every" not in self.settings:
            return []
        every = self.settings["checkpoint_every"]
        steps: list[int] = []
        for event in self.events:
            if event["kind"] == "resumed":
                steps = [step for step in steps if step <= event["step"]]
            elif event["kind"] == "checkpoint" and event.get("step") is not None:
                steps.append(event["step"])
        return sorted({step for step in steps if not (isinstance(every, int) and step % every == 0)})

    @cached_property
    def earlier_ends(self) -> list[int]:
        """Steps after which the run was complete, until it was submitted again with more steps."""
        steps: list[int] = []
        is_complete = False
        for event in self.events:
            if event["kind"] == "resumed" and is_complete:
                steps.append(event["step"])
            if event["kind"] in ("finished", "resumed"):
                is_complete = event.get("state") == "COMPLETED"
        return steps

    @cached_property
    def environments(self) -> dict[int, dict[str, Any]]:
        """The environment by attempt."""
        return {int(line.get("attempt", 0)): line for line in read_json_lines(self.run.environment)}

    @cached_property
    def parts(self) -> tuple[TrainedPart, ...]:
        """The parts of the training whose steps count, in order."""
        logged = set(self._attempts.values())
        started: dict[int, dict[str, Any]] = {}
        parts: list[TrainedPart] = []
        micro: int | None = None
        for event in self.events:
            attempt = int(event.get("attempt", 0))
            if event["kind"] == "started":
                started[attempt] = event
                if attempt in logged and not self._begins_with_resume(attempt):
                    parts = _replaced(parts, 0, event, attempt, micro)
            elif event["kind"] == "resumed" and attempt in started:
                parts = _replaced(parts, int(event["step"]), started[attempt], attempt, micro)
            elif event["kind"] == "failure":
                micro = event.get("micro_batch_size", micro)
        return tuple(parts)

    def _begins_with_resume(self, attempt: int) -> bool:
        """Return true if an attempt first loaded a checkpoint. A rollback loads one later."""
        kinds = [event["kind"] for event in self.events if event.get("attempt") == attempt]
        return next((kind for kind in kinds if kind in _TRAINING_EVENTS), None) == "resumed"

    @cached_property
    def samples(self) -> dict[int, dict[int, list[int]]]:
        """Sample indices by step and rank; the last attempt of a step counts."""
        found: dict[int, tuple[int, dict[int, list[int]]]] = {}
        folder = self.run.samples(0, 0).parent
        for match in filter(None, map(_SAMPLES_FILE.fullmatch, sorted(self.run.storage.names(folder)))):
            attempt, rank = int(match[1]), int(match[2])
            for line in read_json_lines(folder / match[0]):
                step = int(line["step"])
                latest, ranks = found.get(step, (attempt, {}))
                if attempt > latest:
                    ranks = {}
                if attempt >= latest:
                    found[step] = attempt, {**ranks, rank: line["indices"]}
        # The samples of an excluded step were trained only before the rollback.
        return {step: ranks for step, (_, ranks) in found.items() if step not in self.rollbacks}


def same_number(one: object, other: object) -> bool:
    """True if two values of metrics are equal bit for bit; all NaNs are equal."""
    return one == other or (one != one and other != other)


def _replaced(
    parts: Sequence[TrainedPart], start: int, started: Mapping[str, Any], attempt: int, micro: int | None
) -> list[TrainedPart]:
    """Return the parts after an attempt trained all steps after `start` again."""
    kept = [part for part in parts if part.start < start]
    shape = int(started.get("nodes", 1)), int(started.get("world_size", 1)), micro
    if kept and kept[-1].shape == shape:
        kept[-1] = replace(kept[-1], attempts=(*kept[-1].attempts, attempt))
    else:
        kept.append(TrainedPart(start, shape[0], shape[1], (attempt,), micro))
    return kept
