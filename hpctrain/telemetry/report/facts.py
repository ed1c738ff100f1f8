"""Everything that a report tells of a run, as plain values. Nothing of the run has to be whole."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.rundir import RunDir
from hpctrain.telemetry.goodput import Goodput, goodput_of
from hpctrain.telemetry.ledger import Ledger
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.attempts import VANISHED, Attempt, attempts_of
from hpctrain.telemetry.report.curves import Curves, Point, rates
from hpctrain.telemetry.report.devices import Devices, read_devices
from hpctrain.telemetry.report.lines import read_lines, without_collecting
from hpctrain.telemetry.report.pieces import (
    Checkpoint,
    Code,
    read_checkpoints,
    read_codes,
    read_environment,
    read_spec,
)
from hpctrain.telemetry.report.secrets import surroundings_without_secrets, without_secrets

_GOING = ("PENDING", "RUNNING")


@dataclass(frozen=True)
class State:
    """What the caller knows of the run beyond its folder."""

    name: str | None = None
    """COMPLETED, FAILED, CANCELLED, RUNNING, PENDING or UNKNOWN; None takes what the folder says."""
    words: str = ""
    cause: str | None = None
    again: Sequence[str] = ()
    """The command that runs it again."""


@dataclass
class Facts:
    """A run, read."""

    run_id: str
    folder: str
    state: str
    words: str
    cause: str | None
    now: float
    events: list[dict[str, Any]]
    spec: dict[str, Any]
    ledger: Ledger
    goodput: Goodput
    curves: Curves
    attempts: list[Attempt]
    checkpoints: list[Checkpoint]
    rates: list[Point]
    codes: list[Code]
    devices: Devices
    environment: dict[str, Any]
    """What the newest start of the ranks ran on, and the settings of its training."""
    again: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def start(self) -> float:
        """The first sign of the run, in seconds since the epoch; now, where there is none."""
        return self.ledger.spans[0].start_us / 1e6 if self.ledger.spans else self.now

    @property
    def end(self) -> float:
        """The last sign of the run."""
        return self.ledger.spans[-1].end_us / 1e6 if self.ledger.spans else self.now

    @property
    def is_going(self) -> bool:
        return self.state in _GOING

    @property
    def step(self) -> int | None:
        """The last step that was logged."""
        return max(self.curves.counting, default=None)

    @property
    def steps_per_s(self) -> float | None:
        """The median of what was logged."""
        known = [rate for _, rate in self.rates if rate is not None]
        return statistics.median(known) if known else None

    @property
    def interruptions(self) -> list[Attempt]:
        """Attempts that ended before the run did."""
        return [attempt for attempt in self.attempts if attempt.interrupted]

    def document(self) -> dict[str, Any]:
        """What `--format json` prints."""
        ledger = self.ledger
        lowest = self.curves.lowest("loss")
        return {
            "run_id": self.run_id,
            "folder": self.folder,
            "state": self.state,
            "cause": self.cause,
            "start": self.start,
            "end": self.end,
            "wall_us": ledger.wall_us,
            "step": self.step,
            "loss": self.curves.last("loss"),
            "loss_is_no_number_since": self.curves.no_number_since("loss"),
            "lowest_loss": None if lowest is None else {"step": lowest[0], "loss": lowest[1]},
            "last": {name: self.curves.last(name) for name in self.curves.names},
            "steps_per_s": self.steps_per_s,
            "lost_steps": ledger.lost_steps,
            "ledger": [
                {"what": what.value, "us": us, "measured": what in ledger.measured}
                for what, us in ledger.totals_us.items()
            ],
            **asdict(self.goodput),
            "attempts": [
                {**asdict(attempt), "interrupted": attempt.interrupted} for attempt in self.attempts
            ],
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "gpus": [
                {"gpu": row, **{each.quantity.field: each.means[index] for each in self.devices.maps}}
                for index, row in enumerate(self.devices.rows)
            ],
            "nodes": [
                {
                    **asdict(node),
                    **{each.quantity.field: each.means[index] for each in self.devices.node_maps},
                }
                for index, node in enumerate(self.devices.nodes)
            ],
            "advice": [asdict(one) for one in advise(self)],
            "environment": self.environment,
            "spec": self.spec,
            "code": [
                {"commit": code.commit, "changed": code.changed, "new_files": code.new_files}
                for code in self.codes
            ],
            "again": self.again,
            "notes": self.notes,
        }


@without_collecting()
def read_facts(run: RunDir, state: State, *, now: float) -> Facts:
    """Read the folder of a run, or of a training that nobody submitted.

    Args:
        run: the folder; what is missing or damaged in it is not told of.
        state: what is known besides.
        now: seconds since the epoch.
    """
    events, metrics = read_lines(run.events), read_lines(run.metrics)
    name = state.name or _state_on_record(events)
    going = name in _GOING
    ledger = Ledger.of(events, metrics, until=now if going else None, waits=name == "PENDING")
    curves = Curves.of(metrics)
    start_us, end_us = (ledger.spans[0].start_us, ledger.spans[-1].end_us) if ledger.spans else (0, 0)
    attempts = attempts_of(events, ledger, curves.by_attempt)
    if attempts and attempts[-1].end is None and name in ("FAILED", "CANCELLED"):
        attempts[-1].end, attempts[-1].cause = "vanished", VANISHED
    return Facts(
        run_id=run.run_id,
        folder=str(run.path),
        state=name,
        words=state.words,
        cause=state.cause or _cause_on_record(events, attempts, name),
        now=now,
        events=events,
        spec=without_secrets(read_spec(run.spec)),
        ledger=ledger,
        goodput=goodput_of(ledger, curves.counting.values()),
        curves=curves,
        attempts=attempts,
        checkpoints=read_checkpoints(run, events),
        rates=rates(metrics, start_us / 1e6),
        codes=read_codes(run),
        environment=surroundings_without_secrets(read_environment(run)),
        devices=read_devices(run.all_telemetry(), start_us / 1e6, end_us / 1e6),
        again=list(state.again),
        notes=[*ledger.notes, *(["Nothing is on record of this run yet."] if not ledger.spans else [])],
    )


def _state_on_record(events: Sequence[Mapping[str, Any]]) -> str:
    for event in reversed(events):
        if event.get("kind") == "finished":
            return str(event.get("state"))
        if event.get("kind") in ("started", "submitted"):
            break
    return "UNKNOWN"


def _cause_on_record(
    events: Sequence[Mapping[str, Any]], attempts: Sequence[Attempt], state: str
) -> str | None:
    if state != "FAILED":
        return None
    finished = [event for event in events if event.get("kind") == "finished"]
    cause = finished[-1].get("cause") if finished else None
    return str(cause) if cause else (attempts[-1].cause if attempts else None)
