"""Record how long the ranks of an attempt took to start, by part and node."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable

from msgspec.structs import asdict

from hpctrain import system
from hpctrain.record_types import PartDuration, RankMessage
from hpctrain.rundir import RunDir
from hpctrain.telemetry.startup_parts import StartupPart, describe_startup, durations_s

log = logging.getLogger(__name__)

#: Number of nodes in the record.
_MAX_NODES = 16


class StartupRecord:
    def __init__(
        self,
        run: RunDir,
        attempt: int,
        world_size: int,
        host_of: Callable[[int], str],
        job_started_at: float | None,
    ) -> None:
        self._run, self._attempt, self._world_size, self._host_of = run, attempt, world_size, host_of
        self._begun = system.time()
        self._job_s = None if job_started_at is None else round(max(0.0, self._begun - job_started_at), 3)
        self._durations: dict[int, dict[str, float]] = {}

    def on_message(self, rank: int, message: RankMessage) -> None:
        if message.startup is None or rank in self._durations:
            return
        self._durations[rank] = durations_s(self._begun, message.startup)
        if len(self._durations) == self._world_size:
            seconds, parts, slowest_nodes = self._summarize()
            fields = {name: asdict(part) for name, part in parts.items()}
            self._run.log_event(
                "startup", self._attempt, seconds=seconds, parts=fields, slowest_nodes=slowest_nodes
            )
            log.info("attempt %d: %s", self._attempt, describe_startup(seconds, parts))

    def _summarize(self) -> tuple[float, dict[str, PartDuration], dict[str, dict[str, float]]]:
        job_s, ranks = self._job_s, self._durations
        durations = {} if job_s is None else {StartupPart.JOB.value: PartDuration(job_s, job_s)}
        for part in StartupPart:
            if seconds := {rank: spent[part] for rank, spent in ranks.items() if part in spent}:
                slowest = max(seconds, key=seconds.__getitem__)
                median = round(statistics.median(seconds.values()), 3)
                durations[part.value] = PartDuration(median, seconds[slowest], self._host_of(slowest))
        nodes: dict[str, dict[str, float]] = {}
        for rank, spent in ranks.items():
            node = nodes.setdefault(self._host_of(rank), {})
            node |= {name: max(seconds, node.get(name, 0.0)) for name, seconds in spent.items()}
        slowest_nodes = sorted(nodes, key=lambda host: -sum(nodes[host].values()))[:_MAX_NODES]
        total_s = max(sum(spent.values()) for spent in ranks.values())
        return round(total_s, 3), durations, {host: nodes[host] for host in slowest_nodes}
