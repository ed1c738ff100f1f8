"""Start the ranks of each attempt, from standby workers if possible, and receive their messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self

from msgspec import convert

from hpctrain import system
from hpctrain.authentication import new_secret
from hpctrain.errors import HpctrainError, Unauthenticated
from hpctrain.files import read_json, write_atomic
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.record_types import RankMessage, read_record
from hpctrain.rundir import RunDir
from hpctrain.supervisor.launch.job_step import EmitEvent, JobStep, Launcher
from hpctrain.supervisor.launch.task_command import worker_command
from hpctrain.supervisor.workers.batch_launcher import BatchLauncher, link_own_log
from hpctrain.supervisor.workers.hang_detection import PhaseLimits
from hpctrain.supervisor.workers.heartbeat_server import TICK_INTERVAL_S, HeartbeatServer
from hpctrain.supervisor.workers.observed_groups import ObservedGroups
from hpctrain.supervisor.workers.rank_monitor import RankMonitor
from hpctrain.supervisor.workers.standby_workers import StandbyWorkers
from hpctrain.supervisor.workers.startup_record import StartupRecord

log = logging.getLogger(__name__)


class WorkerGroup:
    """Starts the ranks of an attempt, from standby workers if possible; another thread receives messages."""

    def __init__(
        self, run: RunDir, spec: JobSpec, launcher: Launcher, job_started_at: float | None = None
    ) -> None:
        self._run, self._spec, self._launcher = run, spec, launcher
        #: Start of the job, in seconds since the epoch, until its first attempt; None if unknown.
        self._job_started_at = job_started_at
        self._server: HeartbeatServer
        self._limits = PhaseLimits(spec.hang_timeout_s, _read_phase_durations(run))
        self._lock = system.Lock()
        self._attempt = -1
        self._monitor: RankMonitor | ObservedGroups | None = None
        self._startup: StartupRecord | None = None
        self._standby: StandbyWorkers | None = None
        self._standby_variables: Callable[[int], Mapping[str, str]]
        self._imported_at: float | None = None
        self._modules: list[str] = []
        self._standby_started = False
        self._closed = system.Event()

    def __enter__(self) -> Self:
        self._server = HeartbeatServer(self._launcher.address, self)
        self._server.__enter__()
        system.Thread(target=self._send_requests, name="requests", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        # Close the connections first: no new standby workers start, and waiting workers detect the closed
        # connection.
        self._server.__exit__()
        if (standby := self._take_standby()) is not None:
            standby.close()

    def start(
        self,
        attempt: int,
        rendezvous: Mapping[str, str],
        variables: Callable[[int], Mapping[str, str]],
        emit: EmitEvent,
    ) -> JobStep:
        """Start the ranks of an attempt, with the store's address and the variables of its number."""
        spec, hosts = self._spec, list(self._launcher.hosts)
        world_size = len(hosts) * spec.ntasks_per_node

        def host_of(rank: int) -> str:
            return hosts[rank // spec.ntasks_per_node]

        startup = StartupRecord(self._run, attempt, world_size, host_of, self._job_started_at)
        self._job_started_at = None
        environ = {**rendezvous, **variables(attempt)}
        send = partial(self._server.send, attempt)
        groups: ObservedGroups | None = None

        def new_monitor(
            send: Callable[[Mapping[str, Any]], int], host_of: Callable[[int], str], world_size: int
        ) -> RankMonitor:
            return RankMonitor(self._run, attempt, step, send, emit, self._limits, host_of, world_size)

        if isinstance(self._launcher, BatchLauncher):

            def link_log(*link: Any) -> None:
                # The file system may hang, and this thread must keep receiving.
                system.Thread(target=link_own_log, args=(self._run, attempt, *link), daemon=True).start()

            groups = self._launcher.groups = ObservedGroups(send, new_monitor, link_log)
        step: JobStep = self._start_from_standby(attempt, hosts, environ, emit) or self._launcher.start(
            worker_command(spec, len(hosts)), {**environ, **self._server.variables, **new_secret()}, emit
        )
        with self._lock:
            self._attempt, self._monitor = attempt, groups or new_monitor(send, host_of, world_size)
            self._startup = startup if groups is None else None
            self._standby_variables = variables
            self._imported_at, self._standby_started = None, False
        return step

    def stop_monitoring(self) -> None:
        with self._lock:
            monitor, self._monitor = self._monitor, None
        if monitor is not None:
            monitor.close()
        with suppress(OSError):
            record = json.dumps(self._limits.max_duration_s) + "\n"
            write_atomic(self._run.phase_durations, record, durable=False)

    def on_join(self, attempt: int, introduction: Mapping[str, Any]) -> int:
        with self._lock:
            monitor = self._monitor if attempt == self._attempt else None
        if not isinstance(monitor, ObservedGroups):
            raise Unauthenticated(f"it belongs to attempt {attempt}, which has ended")
        return monitor.join(introduction)

    def on_message(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        received = convert(message, RankMessage)
        with self._lock:
            monitor, startup = (self._monitor if attempt == self._attempt else None), self._startup
            standby = self._standby if self._standby and self._standby.attempt == attempt else None
        if monitor is not None:
            if startup is not None:
                startup.on_message(rank, received)
            monitor.on_message(rank, received)
        elif standby is not None:
            standby.on_message(rank, received)

    def on_disconnect(self, attempt: int, rank: int) -> None:
        with self._lock:
            monitor = self._monitor if attempt == self._attempt else None
        if monitor is not None:
            monitor.on_disconnect(rank)

    def on_tick(self) -> None:
        with self._lock:
            monitor = self._monitor
        if monitor is not None:
            monitor.on_tick()
        if isinstance(monitor, RankMonitor):
            self._start_standby_when_due(monitor)

    def _send_requests(self) -> None:
        """Send requested profiles to the ranks, in a separate thread, because the file system may hang."""
        while not self._closed.wait(TICK_INTERVAL_S):
            path = self._run.profile_request
            with self._lock:
                attempt, monitor = self._attempt, self._monitor
            try:
                record = read_json(path)
                ranks = [int(rank) for rank in record["ranks"]]
                request = {"number": int(record["number"]), "ranks": ranks, "steps": int(record["steps"])}
                if monitor is not None and monitor.are_connected(ranks):
                    path.unlink()
                    self._server.send(attempt, {"profile": request})
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("cannot read %s: %r", path, error)
                with suppress(OSError):
                    path.unlink()

    def _start_from_standby(
        self, attempt: int, hosts: list[str], environ: Mapping[str, str], emit: EmitEvent
    ) -> JobStep | None:
        if (standby := self._take_standby()) is None:
            return None
        if standby.is_usable(attempt, hosts):
            return standby.activate(environ, emit)
        standby.close()
        return None

    def _take_standby(self) -> StandbyWorkers | None:
        with self._lock:
            standby, self._standby = self._standby, None
        return standby

    def _start_standby_when_due(self, monitor: RankMonitor) -> None:
        """Start standby workers for the next attempt once the current ranks have trained for a while."""
        after_s = self._spec.standby_workers_s
        # MPI processes must start together.
        if after_s is None or self._spec.torchrun or self._spec.mpi != "none" or self._standby_started:
            return
        if (modules := monitor.modules) is None:
            return
        now = system.monotonic()
        if self._imported_at is None or modules != self._modules:
            # Late imports, such as in the first step, are also slow.
            self._imported_at, self._modules = now, modules
        if now - self._imported_at < after_s:
            return
        self._standby_started = True
        if changed := monitor.changed:
            message = (
                "not starting standby workers: the script sets environment variables that imports may read "
            )
            log.info(message + "(%s). Set them with --env instead", ", ".join(sorted(changed)))
            return
        # The file system may hang, but this thread must keep receiving from the ranks.
        system.Thread(target=self._start_standby, args=(monitor, modules), daemon=True).start()

    def _start_standby(self, monitor: RankMonitor, modules: list[str]) -> None:
        attempt, hosts = self._attempt + 1, len(self._launcher.hosts)
        command, ranks = worker_command(self._spec, hosts), hosts * self._spec.ntasks_per_node
        try:
            # Standby workers have a separate secret, which is never sent.
            variables = {**self._standby_variables(attempt), **self._server.variables, **new_secret()}
            with self._lock:
                if self._monitor is monitor:
                    workers = StandbyWorkers(self._launcher, self._server, command, variables, modules, ranks)
                    self._standby = workers
        except (OSError, HpctrainError) as error:
            log.warning("cannot start standby workers: %s", error)


def _read_phase_durations(run: RunDir) -> dict[str, float]:
    try:
        return read_record(run.phase_durations, dict[str, float])
    except (OSError, ValueError):
        return {}
