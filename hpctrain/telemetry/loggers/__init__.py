"""Loggers that receive the metrics: CSV, TensorBoard, Weights & Biases, MLflow, Neptune.

Imports none of their clients, and no torch.
"""

from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd, find_loggers
from hpctrain.telemetry.loggers.trackers import Csv, MLflow, Neptune, TensorBoard, Wandb

__all__ = ["Csv", "TensorBoard", "Wandb", "MLflow", "Neptune"]
__all__ += ["Logger", "LoggedRun", "MetricRecord", "TrainingEnd", "find_loggers"]
