"""Record of an attempt's start: the duration of each part, and the slowest nodes."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain import system
from hpctrain.rundir import RunDir
from hpctrain.telemetry.startup_parts import PartDuration, StartupDurations, StartupPart, durations_s

log = logging.getLogger(__name__)

#: Number of nodes in the record.
_MAX_NODES = 16


class StartupRecord:
    """Collects the times at which each rank ended the parts of its start."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        world_size: int,
        host_of: Callable[[int], str],
        job_started_at: float | None,
    ) -> None:
        """Start the clock.

        Args:
            run: the run.
            attempt: number of the attempt.
            world_size: number of ranks.
            host_of: returns the host of a rank.
            job_started_at: start of the job, in seconds since the epoch, if this is its first attempt.
        """
        self._run, self._attempt, self._world_size, self._host_of = run, attempt, world_size, host_of
        self._begun = system.time()
        self._job_s = None if job_started_at is None else round(max(0.0, self._begun - job_started_at), 3)
        self._durations: dict[int, dict[str, float]] = {}

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Record the start of a rank, if the message reports it. After the last rank, write the event."""
        if (ends := message.get("startup")) is None or rank in self._durations:
            return
        self._durations[rank] = durations_s(
            self._begun, {str(part): float(end) for part, end in ends.items()}
        )
        if len(self._durations) == self._world_size:
            durations = self._summarize()
            self._run.log_event("startup", self._attempt, **durations.fields())
            log.info("attempt %d: %s", self._attempt, durations.describe())

    def _summarize(self) -> StartupDurations:
        job_s, ranks = self._job_s, self._durations
        parts = {} if job_s is None else {StartupPart.JOB.value: PartDuration(job_s, job_s)}
        for part in StartupPart:
            if found := {rank: spent[part] for rank, spent in ranks.items() if part in spent}:
                slowest = max(found, key=found.__getitem__)
                median = round(statistics.median(found.values()), 3)
                parts[part.value] = PartDuration(median, found[slowest], self._host_of(slowest))
        nodes: dict[str, dict[str, float]] = {}
        for rank, spent in ranks.items():
            node = nodes.setdefault(self._host_of(rank), {})
            node |= {part: max(seconds, node.get(part, 0.0)) for part, seconds in spent.items()}
        slowest_nodes = sorted(nodes, key=lambda host: -sum(nodes[host].values()))[:_MAX_NODES]
        seconds = max(sum(spent.values()) for spent in ranks.values())
        return StartupDurations(round(seconds, 3), parts, {host: nodes[host] for host in slowest_nodes})
