"""Logger for TensorBoard: event files written by TensorBoard's own package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.telemetry.loggers.logger import LoggedRun, MetricRecord, TrainingEnd


@dataclass
class TensorBoard:
    """Logger that writes `tensorboard/` in the run folder, or another folder.

    Needs `pip install tensorboard`.
    """

    folder: str | None = None
    name: str = "tensorboard"

    def start(self, run: LoggedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self.folder) / run.run_id if self.folder else run.folder / "tensorboard"
        self._events: Any = EventFileWriter(str(folder))
        if run.hparams:
            self._log_hparams(run)

    def _log_hparams(self, run: LoggedRun) -> None:
        """Write the hyper-parameters for TensorBoard's HParams page; each attempt may write them."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        values = {name: value for name, value in run.hparams.items() if value is not None}
        self._events.add_event(Event(summary=hparams_pb(values, trial_id=run.run_id)))

    def log(self, lines: Sequence[MetricRecord]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for line in lines:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
            self._events.add_event(Event(wall_time=line.time, step=line.step, summary=Summary(value=values)))
        self._events.flush()

    def rewind(self, step: int) -> bool:
        """Start a new session, which discards all events logged since its step (tensorflow, event.proto)."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._events.add_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        return True

    def finish(self, ending: TrainingEnd) -> None:  # noqa: ARG002
        self._events.close()
