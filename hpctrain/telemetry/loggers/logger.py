"""Define the interface of a logger, which receives each step of a run once, and find loggers by name."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from hpctrain.class_registry import Registry
from hpctrain.errors import UserError

#: End of an attempt: completed, stopped for a later resume, or other.
TrainingEnd = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are logged."""

    run_id: str
    folder: Path
    """The run folder."""
    known: str | None = None
    """Value that `start` returned in an earlier attempt, such as the name of the run in the tracker."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Training settings and hyper-parameters, as plain values."""
    hparams: Mapping[str, Any] = field(default_factory=dict)
    """The hyper-parameters alone, without the training settings."""


@dataclass(frozen=True)
class MetricRecord:
    """Metrics of one step."""

    step: int
    time: float
    """Seconds since the epoch."""
    attempt: int
    epoch: int
    values: Mapping[str, float]


@runtime_checkable
class Logger(Protocol):
    """Receiver of a run's metrics, in a separate process that cannot block training.

    Methods are called one at a time. An exception is reported in the log of rank 0, and the call is repeated
    later. The logger is pickled for transfer to its process.
    """

    name: str
    """Name of the logger's state in the run folder, unique among the loggers of a run."""

    def start(self, run: LoggedRun) -> str | None:
        """Start or resume logging. The return value is saved, and passed as `known` in the next attempt."""

    def log(self, lines: Sequence[MetricRecord]) -> None:
        """Log the metrics of some steps. No value of a step is sent twice, unless `rewind` returned True."""

    def rewind(self, step: int) -> bool:
        """Discard everything after `step`, which is trained again; return False if that is impossible."""

    def finish(self, ending: TrainingEnd) -> None:
        """Ensure that all lines have been delivered."""


LOGGERS: Registry[Logger] = Registry(
    setting="loggers",
    kind=Logger,  # type: ignore[type-abstract]
    ours={
        "csv": "trackers:Csv",
        "tensorboard": "trackers:TensorBoard",
        "wandb": "trackers:Wandb",
        "mlflow": "trackers:MLflow",
        "neptune": "trackers:Neptune",
    },
)
#: Package that a logger requires, by the name of the logger.
_MODULES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "neptune": "neptune_scale"}
#: Packages to install, if they have other names.
_PACKAGES = {"mlflow": "alembic mlflow-skinny sqlalchemy", "neptune": "neptune-scale"}
NEPTUNE_NOTE = "Neptune's hosted service has shut down; this logger works only with NEPTUNE_MODE=offline."
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def find_loggers(given: str | Logger | Iterable[str | Logger]) -> list[Logger]:
    """Return the loggers given by name, as objects, or as loggers of Lightning.

    Raises:
        UserError: a name is unknown, a package is not installed, or two loggers have the same name.
    """
    choices = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    loggers = [LOGGERS.find(choice)() if isinstance(choice, str) else _checked(choice) for choice in choices]
    for name, count in Counter(logger.name for logger in loggers).items():
        if count > 1:
            raise UserError(
                f"{count} loggers are named {name!r}. Give each logger a different name (name=…)."
            )
    for kind, module in _MODULES.items():
        if any(isinstance(logger, LOGGERS.find(kind)) for logger in loggers) and find_spec(module) is None:
            raise UserError(
                f"The logger {kind!r} requires the module {module!r}, which is not installed. Run "
                f"`pip install {_PACKAGES.get(kind, kind)}`."
                + (f" {NEPTUNE_NOTE}" if kind == "neptune" else "")
            )
    return loggers


def _convert_lightning_logger(logger: Any) -> Logger:
    """Return the logger that writes to the destination of Lightning's logger, or raise an error."""
    kind = type(logger).__name__
    if kind != "NeptuneLogger" and getattr(logger, "_prefix", None):
        raise UserError(
            f"{kind} has prefix={logger._prefix!r}, but hpctrain logs metrics under their own names. Remove "
            "prefix, and choose the names in self.log."
        )
    arguments: dict[str, Any]
    match kind:
        case "CSVLogger" | "TensorBoardLogger":
            name = kind.removesuffix("Logger").lower()
            arguments = {"folder": os.path.join(logger.save_dir, logger.name or "")}
        case "WandbLogger":
            options = {key: value for key, value in logger._wandb_init.items() if value is not None}
            name, arguments = "wandb", {"options": options}
        case "MLFlowLogger":
            name = "mlflow"
            arguments = {"experiment": logger._experiment_name, "tracking_uri": logger._tracking_uri}
        case "NeptuneLogger":
            name, arguments = "neptune", {"project": logger._project_name}
        case _:
            raise UserError(
                f"loggers contains a {kind} of Lightning, which has no counterpart here. Choose from "
                f"{', '.join(map(repr, LOGGERS.ours))}, or write a logger (docs/loggers.md)."
            )
    return LOGGERS.find(name)(**arguments)


def _checked(logger: object) -> Logger:
    if type(logger).__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
        logger = _convert_lightning_logger(logger)
    if not isinstance(logger, Logger):
        raise UserError(
            f"{logger!r} is not a logger. A logger must have a name, and the methods start, log, rewind and "
            "finish."
        )
    if not _NAME.fullmatch(logger.name):
        raise UserError(
            f"{logger.name!r} is not a valid logger name. A name must start with a letter or digit, and may "
            "contain only letters, digits, '.', '_' and '-'."
        )
    return logger
