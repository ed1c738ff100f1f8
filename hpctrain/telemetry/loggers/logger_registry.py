"""Look up and validate the loggers of a run."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from hpctrain.class_registry import Registry
from hpctrain.errors import UserError
from hpctrain.telemetry.loggers.logger import Logger
from hpctrain.telemetry.loggers.trackers import NEPTUNE_NOTE

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
    """Return the logger here that writes to the destination of Lightning's logger.

    Raises:
        UserError: there is none.
    """
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
