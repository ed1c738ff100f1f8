"""Run the loggers of a training run in a separate process of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from hpctrain.records.buffered_writer import ReportMessage
from hpctrain.records.call_payload import dumps
from hpctrain.rundir import RunDir
from hpctrain.runtime.resumed_values import IgnoredValue
from hpctrain.runtime.sidecar import Sidecar
from hpctrain.telemetry.hparams import applied_hparams
from hpctrain.telemetry.loggers import Logger, TrainingEnd
from hpctrain.telemetry.loggers.dispatcher import LoggerConfig

#: Seconds for the last lines of the loggers. The time is short after a stop or a failure, because others wait
#: for the rank.
_LIMITS_S: dict[TrainingEnd, float] = {"completed": 30.0, "stopped": 8.0, "failed": 8.0}


class LoggerProcess:
    def __init__(
        self,
        loggers: Sequence[Logger],
        run: RunDir | None,
        environment: Mapping[str, Any],
        print_message: ReportMessage,
    ) -> None:
        self._print_message = print_message
        self._config: LoggerConfig | None = None
        self._process: Sidecar | None = None
        if loggers and run is None:
            names = ", ".join(logger.name for logger in loggers)
            print_message(
                f"hpctrain: There is no run folder, so these loggers receive no metrics: {names}. Set "
                "run_dir, or use `hpctrain submit`."
            )
        elif loggers and run is not None:
            named_loggers = [(f"the logger {logger.name!r}", logger) for logger in loggers]
            pickled = dumps(list(loggers), "Trainer", named_loggers)
            config = {**environment, **environment["settings"]}
            del config["settings"]
            hparams = config.pop("hparams", {})
            self._config = LoggerConfig(str(run.path), config, [*sys.path], pickled, hparams)

    def __enter__(self) -> Self:
        return self

    def start(self, ignored: Sequence[IgnoredValue] = ()) -> None:
        if self._config is None:
            return
        try:
            self._process = Sidecar("hpctrain.telemetry.loggers.dispatcher")
        except OSError as error:
            self._print_message(
                f"hpctrain: cannot start a process for the loggers, so they receive no metrics: {error}"
            )
        else:
            hparams = applied_hparams(self._config.hparams, [value.record for value in ignored])
            config = replace(self._config, config={**self._config.config, **hparams}, hparams=hparams)
            self._process.write(config.to_bytes())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is None:
            return
        ending: TrainingEnd = "completed" if kind is None else "failed"
        if issubclass(kind or Exception, SystemExit):
            ending = "stopped"
        if not self._process.stop(_LIMITS_S[ending], ending):
            self._print_message(
                f"hpctrain: The loggers did not finish within {_LIMITS_S[ending]:g} s, so their output "
                "may lack the last steps. metrics.jsonl contains all steps."
            )
