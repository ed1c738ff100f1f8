"""Run the loggers in a process separate from rank 0, so that a slow tracker cannot block training.

The process reads its configuration from standard input, which remains open during training. A final line
reports the end of training.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers.dispatcher import LoggerDispatcher, LoggerState
from hpctrain.telemetry.loggers.logger import LoggedRun, TrainingEnd

#: Seconds allowed for the last lines after training has ended.
_LIMIT_S = 30.0


@dataclass(frozen=True)
class LoggerConfig:
    folder: str
    config: dict[str, Any]
    sys_path: list[str]
    """The module search path of the training process, whose modules may define a logger."""
    loggers: bytes
    """Pickled separately, because unpickling requires those modules."""
    hparams: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return pickle.dumps((self.folder, self.config, self.sys_path, self.loggers, self.hparams))

    @classmethod
    def read(cls, stream: BinaryIO) -> LoggerConfig:
        """Read the configuration from a stream.

        Raises:
            EOFError, UnpicklingError: training ended before the configuration was written.
        """
        return cls(*pickle.load(stream))


def main() -> int:
    """Deliver metrics to the loggers until training ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        config = LoggerConfig.read(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):
        return 0
    sys.path += [path for path in config.sys_path if path not in sys.path]
    run = RunDir(Path(config.folder))
    logged = LoggedRun(run.run_id, run.path, config=config.config, hparams=config.hparams)
    ended, endings = threading.Event(), list[TrainingEnd]()
    dispatchers = [
        LoggerDispatcher(
            logger, logged, run.metrics, LoggerState.load(run.logger_state(logger.name)), _report
        )
        for logger in pickle.loads(config.loggers)
    ]
    threads = [
        threading.Thread(target=dispatcher.run, args=(ended, lambda: endings[0]), daemon=True)
        for dispatcher in dispatchers
    ]
    for thread in threads:
        thread.start()
    endings.append(_read_ending(sys.stdin.buffer))
    ended.set()
    deadline = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Remaining threads of a tracker's client must not keep the process alive.
    os._exit(0)


def _read_ending(stream: BinaryIO) -> TrainingEnd:
    """Wait for the end of the training; a killed training sends nothing and counts as failed."""
    ending = stream.readline().decode("ascii", "replace").strip()
    return cast(TrainingEnd, ending) if ending in get_args(TrainingEnd) else "failed"


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
