"""Where metrics go besides `metrics.jsonl`: a file of CSV, TensorBoard, Weights & Biases, MLflow, Neptune.

Imports none of their clients, and no torch.
"""

from hpctrain.telemetry.loggers.choice import find_loggers
from hpctrain.telemetry.loggers.csv_file import Csv
from hpctrain.telemetry.loggers.mlflow import MLflow
from hpctrain.telemetry.loggers.neptune import Neptune
from hpctrain.telemetry.loggers.protocol import Ending, Line, LoggedRun, Logger
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
    "Line",
    "Ending",
    "find_loggers",
]
