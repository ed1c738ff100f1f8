"""Write metrics to a CSV table, TensorBoard, Weights & Biases, MLflow or Neptune.

The client of a tracker is imported when its logger starts.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from hpctrain.files import make_folder, own_file, terminate_partial_line, write_atomic
from hpctrain.telemetry.loggers.logger import NEPTUNE_NOTE, LoggedRun, MetricRecord, TrainingEnd

_FIRST_COLUMNS = ("step", "epoch", "time", "attempt")
#: Limits of MLflow's server per request (MLflow, REST API, "Log Batch").
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM = 1000, 100, 6000
_MLFLOW_STATES: dict[TrainingEnd, str] = {"completed": "FINISHED", "stopped": "SCHEDULED", "failed": "FAILED"}


@dataclass
class Csv:
    """Logger that writes `metrics.csv` in the run folder, or another file.

    With `folder`, it writes this file into a subfolder with the name of the run.
    """

    path: str | None = None
    name: str = "csv"
    folder: str | None = None
    _columns: list[str] = field(default_factory=list, repr=False)

    def start(self, run: LoggedRun) -> None:
        folder = Path(self.folder) / run.run_id if self.folder else run.folder
        self._file = Path(self.path) if self.path else folder / "metrics.csv"
        make_folder(self._file.parent)
        terminate_partial_line(self._file)
        rows = self._read()
        self._columns = list(rows[0]) if rows else []

    def log(self, lines: Sequence[MetricRecord]) -> None:
        names = [name for line in lines for name in line.values]
        columns = list(dict.fromkeys([*(self._columns or _FIRST_COLUMNS), *names]))
        rows: list[Mapping[str, object]] = [
            {**line.values, **{name: getattr(line, name) for name in _FIRST_COLUMNS}} for line in lines
        ]
        if columns == self._columns:
            with open(self._file, "a", newline="", encoding="utf-8", opener=own_file) as file:
                file.write(_csv_text(columns, rows))
            return
        # A metric that first appears later, e.g. in validation, adds a column.
        self._write(columns, [*self._read(), *rows])

    def rewind(self, step: int) -> bool:
        if self._columns:
            self._write(self._columns, [row for row in self._read() if _csv_step(row) <= step])
        return True

    def finish(self, ending: TrainingEnd) -> None:
        """Do nothing: every line is already written."""

    def _read(self) -> list[dict[str, str]]:
        try:
            with open(self._file, newline="", encoding="utf-8", errors="replace") as file:
                return [row for row in csv.DictReader(file, restval="") if None not in row]
        except FileNotFoundError:
            return []

    def _write(self, columns: list[str], rows: Iterable[Mapping[str, object]]) -> None:
        header = dict(zip(columns, columns, strict=True))
        write_atomic(self._file, _csv_text(columns, [header, *rows]), durable=False)
        self._columns = columns


def _csv_text(columns: list[str], rows: Iterable[Mapping[str, object]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _csv_step(row: dict[str, str]) -> float:
    try:
        return float(row.get("step", ""))
    except ValueError:
        return float("inf")  # a truncated line


@dataclass
class TensorBoard:
    """Logger that writes `tensorboard/` in the run folder, or another folder.

    Needs `pip install tensorboard`.
    """

    folder: str | None = None
    name: str = "tensorboard"

    def start(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = Path(self.folder) / run.run_id if self.folder else run.folder / "tensorboard"
        self._events: Any = EventFileWriter(str(folder))
        if run.hparams:
            # For TensorBoard's HParams page; each attempt may write them.
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


class _AppendOnly:
    """A tracker that keeps the values of steps that are trained again."""

    def rewind(self, step: int) -> bool:  # noqa: ARG002
        return False


@dataclass
class Wandb(_AppendOnly):
    """Logger that writes one Weights & Biases run for all attempts. Needs `pip install wandb`.

    Environment variables of Weights & Biases are respected, such as WANDB_MODE, WANDB_PROJECT and
    WANDB_API_KEY. Local files are in the run folder.
    """

    project: str | None = None
    entity: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Other arguments of `wandb.init`."""
    name: str = "wandb"

    def start(self, run: LoggedRun) -> str:
        import wandb

        self._run: Any = wandb.init(
            **{
                "project": self.project,
                "entity": self.entity,
                "name": run.run_id,
                "dir": str(run.folder),
                "id": run.known or uuid4().hex[:12],
                # Resumes the run with that id, or creates it.
                "resume": "allow",
                "config": dict(run.config),
                **self.options,
            }
        )
        # The step is logged as a metric and used as the axis. The tracker's own step only increases, but a
        # repeated step may log a new metric, such as for validation.
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, lines: Sequence[MetricRecord]) -> None:
        for line in lines:
            self._run.log({"step": line.step, "epoch": line.epoch, **line.values})

    def finish(self, ending: TrainingEnd) -> None:
        if ending == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if ending == "completed" else 1)


@dataclass
class MLflow(_AppendOnly):
    """Logger that writes one MLflow run for all attempts. Needs `alembic`, `mlflow-skinny` and `sqlalchemy`.

    The server is set by `tracking_uri` or MLFLOW_TRACKING_URI. Without a server, the run is stored in
    `mlflow.db` in the run folder.
    """

    experiment: str = "hpctrain"
    tracking_uri: str | None = None
    name: str = "mlflow"

    def start(self, run: LoggedRun) -> str:
        from mlflow import MlflowClient, environment_variables
        from mlflow.entities import Param

        variables: Any = environment_variables
        local_uri = f"sqlite:///{run.folder / 'mlflow.db'}"
        uri = self.tracking_uri or variables.MLFLOW_TRACKING_URI.get() or local_uri
        self._client: Any = MlflowClient(uri)
        if run.known:
            self._id = run.known
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        existing = self._client.get_experiment_by_name(self.experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self.experiment)
        self._id = str(self._client.create_run(experiment, run_name=run.run_id).info.run_id)
        params = [Param(name, str(value)[:_MAX_PARAM]) for name, value in run.config.items()]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])
        return self._id

    def log(self, lines: Sequence[MetricRecord]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_mlflow_name(name), value, round(1000 * line.time), line.step)
            for line in lines
            for name, value in line.values.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def finish(self, ending: TrainingEnd) -> None:
        # A run to be resumed is marked as scheduled, without an end time.
        if ending == "stopped":
            self._client.update_run(self._id, status=_MLFLOW_STATES[ending])
        else:
            self._client.set_terminated(self._id, _MLFLOW_STATES[ending])


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow does not allow in a name."""
    return "".join(char if char.isalnum() or char in "_-. /:" else "_" for char in name)[:250] or "_"


@dataclass
class Neptune(_AppendOnly):
    """Logger that writes one Neptune run for all attempts. Needs `pip install neptune-scale`.

    Neptune's hosted service was discontinued, and its data was deleted after 2026-03-05. `mode="offline"`
    still writes files.

    NEPTUNE_PROJECT, NEPTUNE_API_TOKEN and NEPTUNE_MODE are respected. In offline mode, the files are in the
    run folder.
    """

    project: str | None = None
    mode: Literal["async", "offline", "disabled"] | None = None
    name: str = "neptune"

    def start(self, run: LoggedRun) -> str:
        from neptune_scale import Run

        print(f"hpctrain: {NEPTUNE_NOTE} Choose another logger for new runs.", file=sys.stderr, flush=True)
        name = run.known or f"{run.run_id[:80]}-{uuid4().hex[:8]}"
        # Resumes the run with that id, if it exists.
        self._run: Any = Run(
            run_id=name,
            experiment_name=run.run_id,
            project=self.project,
            mode=self.mode,
            log_directory=str(run.folder / "neptune"),
            enable_console_log_capture=False,
        )
        if not run.known:
            self._run.log_configs({f"config/{key}": str(value) for key, value in run.config.items()})
        return name

    def log(self, lines: Sequence[MetricRecord]) -> None:
        for line in lines:
            time = datetime.fromtimestamp(line.time, UTC)
            self._run.log_metrics(dict(line.values), step=line.step, timestamp=time)

    def finish(self, ending: TrainingEnd) -> None:  # noqa: ARG002
        self._run.close()
