"""Logger for MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.telemetry.loggers.logger import LoggedRun, MetricRecord, TrainingEnd

#: Limits of the server per request (MLflow, REST API, "Log Batch").
_MAX_METRICS, _MAX_PARAMS, _MAX_PARAM = 1000, 100, 6000
_STATES: dict[TrainingEnd, str] = {"completed": "FINISHED", "stopped": "SCHEDULED", "failed": "FAILED"}


@dataclass
class MLflow:
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
        own = f"sqlite:///{run.folder / 'mlflow.db'}"
        uri = self.tracking_uri or variables.MLFLOW_TRACKING_URI.get() or own
        self._client: Any = MlflowClient(uri)
        if run.known:
            self._id = run.known
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else self._client.create_experiment(self.experiment)
        self._id = str(self._client.create_run(experiment, run_name=run.run_id).info.run_id)
        params = [Param(name, str(value)[:_MAX_PARAM]) for name, value in run.config.items()]
        for begin in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MAX_PARAMS])
        return self._id

    def log(self, lines: Sequence[MetricRecord]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(name), value, round(1000 * line.time), line.step)
            for line in lines
            for name, value in line.values.items()
        ]
        for begin in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MAX_METRICS])

    def rewind(self, step: int) -> bool:  # noqa: ARG002
        return False

    def finish(self, ending: TrainingEnd) -> None:
        # A run to be resumed is marked as scheduled, without an end time.
        if ending == "stopped":
            self._client.update_run(self._id, status=_STATES[ending])
        else:
            self._client.set_terminated(self._id, _STATES[ending])


def _allowed(name: str) -> str:
    """Replace characters that MLflow does not allow in a name."""
    return "".join(one if one.isalnum() or one in "_-. /:" else "_" for one in name)[:250] or "_"
