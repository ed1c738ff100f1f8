"""Lookup and validation of the loggers of a training."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec

from hpctrain.errors import UserError
from hpctrain.telemetry.loggers.csv_file import Csv
from hpctrain.telemetry.loggers.logger import Logger
from hpctrain.telemetry.loggers.mlflow import MLflow
from hpctrain.telemetry.loggers.neptune import Neptune
from hpctrain.telemetry.loggers.tensorboard import TensorBoard
from hpctrain.telemetry.loggers.wandb import Wandb
from hpctrain.text import suggest

#: Logger class by name, and the package that it requires.
_KINDS: dict[str, tuple[Callable[[], Logger], str | None]] = {
    "csv": (Csv, None),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "neptune": (Neptune, "neptune_scale"),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def find_loggers(given: str | Logger | Iterable[str | Logger]) -> list[Logger]:
    """Return the loggers given by name or as objects.

    Raises:
        UserError: a name is unknown, a package is not installed, or two loggers have the same name.
    """
    given = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    loggers = [_find(one) if isinstance(one, str) else _checked(one) for one in given]
    for name, count in Counter(logger.name for logger in loggers).items():
        if count > 1:
            raise UserError(f"{count} loggers are named {name!r}. Give each a different name: name=…")
    for logger in loggers:
        kind, package = next(
            ((kind, package) for kind, (made, package) in _KINDS.items() if isinstance(logger, made)),  # type: ignore[arg-type]
            ("", None),
        )
        if package is not None and find_spec(package) is None:
            ended = " Neptune's hosted service has been discontinued." * (kind == "neptune")
            raise UserError(
                f"The logger {kind!r} needs the package {package.replace('_', '-')}, which is not installed. "
                f"Install it: pip install 'hpctrain[{kind}]'.{ended}"
            )
    return loggers


def _find(name: str) -> Logger:
    if name not in _KINDS:
        hint = suggest(name, _KINDS, otherwise=f"Choose from {', '.join(_KINDS)}, or pass your own.")
        raise UserError(f"There is no logger {name!r}. {hint}")
    made, _ = _KINDS[name]
    return made()


def _checked(logger: object) -> Logger:
    if not isinstance(logger, Logger):
        raise UserError(
            f"{logger!r} is not a logger: it needs a name and the methods start, log, rewind and finish."
        )
    if not _NAME.fullmatch(logger.name):
        raise UserError(
            f"The logger name {logger.name!r} must be a valid file name: use only letters, digits, '.', "
            "'_' and '-'."
        )
    return logger
