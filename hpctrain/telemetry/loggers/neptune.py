"""Logger for Neptune."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from hpctrain.telemetry.loggers.logger import LoggedRun, MetricRecord, TrainingEnd


@dataclass
class Neptune:
    """Logger that writes one Neptune run for all attempts. Needs `pip install neptune-scale`.

    Neptune's hosted service was discontinued, and its data was deleted after 2026-03-05. `mode="offline"`
    still writes files.

    NEPTUNE_PROJECT, NEPTUNE_API_TOKEN and NEPTUNE_MODE are respected. In offline mode, the files are in the
    run folder.
    """

    project: str | None = None
    mode: Literal["async", "offline", "disabled"] | None = None
    name: str = "neptune"

    def start(self, run: LoggedRun) -> str:
        from neptune_scale import Run

        print(
            "hpctrain: Neptune's hosted service has shut down; this logger works only with "
            "NEPTUNE_MODE=offline. Choose another logger for new runs.",
            file=sys.stderr,
            flush=True,
        )
        name = run.known or f"{run.run_id[:80]}-{uuid4().hex[:8]}"
        # Resumes the run with that id, if it exists.
        self._run: Any = Run(
            run_id=name,
            experiment_name=run.run_id,
            project=self.project,
            mode=self.mode,
            log_directory=str(run.folder / "neptune"),
            enable_console_log_capture=False,
        )
        if not run.known:
            self._run.log_configs({f"config/{key}": str(value) for key, value in run.config.items()})
        return name

    def log(self, lines: Sequence[MetricRecord]) -> None:
        for line in lines:
            self._run.log_metrics(
                dict(line.values), step=line.step, timestamp=datetime.fromtimestamp(line.time, UTC)
            )

    def rewind(self, step: int) -> bool:  # noqa: ARG002
        return False

    def finish(self, ending: TrainingEnd) -> None:  # noqa: ARG002
        self._run.close()
