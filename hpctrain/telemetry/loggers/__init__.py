"""Loggers that receive the metrics: CSV, TensorBoard, Weights & Biases, MLflow, Neptune.

Neptune's hosted service has ended, so its logger is useful only offline.

Imports none of their clients, and no torch.
"""

from hpctrain.telemetry.loggers.csv_file import Csv
from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd
from hpctrain.telemetry.loggers.logger_registry import find_loggers
from hpctrain.telemetry.loggers.mlflow import MLflow
from hpctrain.telemetry.loggers.neptune import Neptune
from hpctrain.telemetry.loggers.tensorboard import TensorBoard
from hpctrain.telemetry.loggers.wandb import Wandb

__all__ = [
    "Csv",
    "TensorBoard",
    "Wandb",
    "MLflow",
    "Neptune",
    "Logger",
    "LoggedRun",
    "MetricRecord",
    "TrainingEnd",
    "find_loggers",
]
