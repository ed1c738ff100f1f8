"""Which loggers a training has, checked as soon as they are named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec

from hpctrain.errors import UserError
from hpctrain.telemetry.loggers.csv_file import Csv
from hpctrain.telemetry.loggers.mlflow import MLflow
from hpctrain.telemetry.loggers.neptune import Neptune
from hpctrain.telemetry.loggers.protocol import Logger
from hpctrain.telemetry.loggers.tensorboard import TensorBoard
from hpctrain.telemetry.loggers.wandb import Wandb

#: What a name stands for, and the package without which it is of no use.
_KINDS: dict[str, tuple[Callable[[], Logger], str | None]] = {
    "csv": (Csv, None),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
    "mlflow": (MLflow, "mlflow"),
    "neptune": (Neptune, "neptune_scale"),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


def find_loggers(given: Sequence[str | Logger]) -> list[Logger]:
    """The loggers that were named, or given.

    Raises:
        UserError: there is none of that name, its package is not installed, or two have the same name.
    """
    if isinstance(given, str):
        raise UserError(f"loggers is {given!r}; give a list, such as [{given!r}].")
    loggers = [_find(one) if isinstance(one, str) else _checked(one) for one in given]
    for name, count in Counter(logger.name for logger in loggers).items():
        if count > 1:
            raise UserError(f"{count} loggers are named {name!r}. Give each a name of its own: name=…")
    for logger in loggers:
        kind, package = next(
            ((kind, package) for kind, (made, package) in _KINDS.items() if isinstance(logger, made)),  # type: ignore[arg-type]
            ("", None),
        )
        if package is not None and find_spec(package) is None:
            raise UserError(
                f"The logger {kind!r} needs the package {package.replace('_', '-')}, which is not installed. "
                f"Install it: pip install 'hpctrain[{kind}]'"
            )
    return loggers


def _find(name: str) -> Logger:
    if name not in _KINDS:
        close = get_close_matches(name, _KINDS, 1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise UserError(f"There is no logger {name!r}. {hint}Take any of {', '.join(_KINDS)}, or your own.")
    made, _ = _KINDS[name]
    return made()


def _checked(logger: object) -> Logger:
    if not isinstance(logger, Logger):
        raise UserError(
            f"{logger!r} is no logger: a logger has a name and the methods start, log, rewind and finish."
        )
    if not _NAME.fullmatch(logger.name):
        raise UserError(
            f"The name {logger.name!r} of a logger cannot be that of a file: take letters, digits, . _ and -"
        )
    return logger
