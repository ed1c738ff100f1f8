"""Read the record of training in a run folder: metrics, samples, environments, and the ranks of each part."""

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


class TrainingRecord:
    """The record of a run. Files are read on first use.

    Attributes:
        run: the run folder.
        steps: metrics by step; the last line of a step counts.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.steps: dict[int, dict[str, Any]] = {}
        self._logged_attempts: dict[int, int] = {}
        for line in read_json_lines(run.metrics, is_metrics):
            values = {name: value for name, value in line.items() if name not in RESERVED_FIELDS - {"epoch"}}
            # Without metrics, the line shows only that a step was completed.
            if "step" in line and values.keys() - {"epoch"}:
                self.steps[int(line["step"])] = values
                self._logged_attempts[int(line["step"])] = int(line.get("attempt", 0))

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return list(self.run.read_events())

    @cached_property
    def environments(self) -> dict[int, dict[str, Any]]:
        """The environment by attempt. Later lines of an attempt add or replace fields."""
        environments: dict[int, dict[str, Any]] = {}
        for line in read_json_lines(self.run.environment):
            environments.setdefault(int(line.get("attempt", 0)), {}).update(line)
        return environments

    @cached_property
    def rollbacks(self) -> dict[int, dict[str, Any]]:
        """The events of the steps that the loss guard excluded by a rollback, by step."""
        bad_losses = [event for event in self.events if event["kind"] == "bad_loss" and event.get("step")]
        return {event["step"]: event for event in bad_losses if event.get("action") == "rollback"}

    @cached_property
    def unscheduled_saves(self) -> list[int]:
        """Steps that the `Trainer` saved in addition to the multiples of `checkpoint_every`.

        Steps that were trained again afterwards are omitted.
        """
        settings = [line.get("settings") for line in self.environments.values()]
        newest = next((entry for entry in reversed(settings) if isinstance(entry, dict)), {})
        if "checkpoint_every" not in newest:
            return []
        every = newest["checkpoint_every"]
        steps: list[int] = []
        for event in self.events:
            if event["kind"] == "resumed":
                steps = [step for step in steps if step <= event["step"]]
            elif event["kind"] == "checkpoint" and event.get("step") is not None:
                steps.append(event["step"])
        return sorted({step for step in steps if not (isinstance(every, int) and step % every == 0)})

    @cached_property
    def earlier_ends(self) -> set[int]:
        """Steps after which the run was complete, until it was submitted again with more steps."""
        steps: set[int] = set()
        is_complete = False
        for event in self.events:
            if event["kind"] == "resumed" and is_complete:
                steps.add(event["step"])
            if event["kind"] in ("finished", "resumed"):
                is_complete = event.get("state") == "COMPLETED"
        return steps

    @cached_property
    def parts(self) -> tuple[TrainedPart, ...]:
        """The parts of the training whose steps count, in order."""
        logged = set(self._logged_attempts.values())
        started: dict[int, dict[str, Any]] = {}
        parts: list[TrainedPart] = []
        micro_batch_size: int | None = None
        for event in self.events:
            attempt = int(event.get("attempt", 0))
            start: int | None = None
            if event["kind"] == "started":
                started[attempt] = event
                if attempt in logged and not self._begins_with_resume(attempt):
                    start = 0
            elif event["kind"] == "resumed" and attempt in started:
                start = int(event["step"])
            elif event["kind"] == "failure":
                micro_batch_size = event.get("micro_batch_size", micro_batch_size)
            if start is not None:
                parts = _replace_tail(parts, start, started[attempt], attempt, micro_batch_size)
        return tuple(parts)

    def _begins_with_resume(self, attempt: int) -> bool:
        """Return true if an attempt began by loading a checkpoint. A rollback loads one later."""
        kinds = [event["kind"] for event in self.events if event.get("attempt") == attempt]
        return next((kind for kind in kinds if kind in _TRAINING_EVENTS), None) == "resumed"

    @cached_property
    def samples(self) -> dict[int, dict[int, list[int]]]:
        """Sample indices by step and rank; the last attempt of a step counts."""
        latest: dict[int, tuple[int, dict[int, list[int]]]] = {}
        folder = self.run.samples(0, 0).parent
        for match in filter(None, map(_SAMPLES_FILE.fullmatch, sorted(self.run.storage.names(folder)))):
            attempt, rank = int(match[1]), int(match[2])
            for line in read_json_lines(folder / match[0]):
                step = int(line["step"])
                latest_attempt, ranks = latest.get(step, (attempt, {}))
                if attempt > latest_attempt:
                    ranks = {}
                if attempt >= latest_attempt:
                    latest[step] = attempt, {**ranks, rank: line["indices"]}
        # The samples of an excluded step were trained only before the rollback.
        return {step: ranks for step, (_, ranks) in latest.items() if step not in self.rollbacks}


def _replace_tail(
    parts: Sequence[TrainedPart],
    start: int,
    started: Mapping[str, Any],
    attempt: int,
    micro_batch_size: int | None,
) -> list[TrainedPart]:
    """Return the parts after an attempt trained all steps after `start` again."""
    kept = [part for part in parts if part.start < start]
    nodes, world_size = int(started.get("nodes", 1)), int(started.get("world_size", 1))
    if kept and kept[-1].shape == (nodes, world_size, micro_batch_size):
        kept[-1] = replace(kept[-1], attempts=(*kept[-1].attempts, attempt))
    else:
        kept.append(TrainedPart(start, nodes, world_size, (attempt,), micro_batch_size))
    return kept
