"""Evaluate the messages of an attempt's ranks to detect hangs and stragglers."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.record_types import RankMessage, RankSnapshot
from hpctrain.rundir import RunDir
from hpctrain.supervisor.launch.job_step import EmitEvent, HangDetected, JobStep, LauncherStuck, RankSignalled
from hpctrain.supervisor.workers.hang_detection import HangDetector, HangInfo, PhaseLimits, blocking_ranks
from hpctrain.supervisor.workers.straggler_detection import LASTING_WINDOWS, StepTimes, StragglerDetector
from hpctrain.text import format_ranks, pluralize

log = logging.getLogger(__name__)

#: Time limit for the answers. A rank reports its position and writes it to a file immediately, unless the
#: file system hangs.
_SNAPSHOT_TIMEOUT_S = 10.0
#: Time for silent ranks to print their position to their logs after a signal.
_SIGNAL_PAUSE_S = 2.0
#: A longer time between two checks means that the supervisor, and probably the ranks, were suspended.
_PAUSE_S = 10.0
#: Time after the exit of the last rank. The end of the step is reported within seconds, unless the report is
#: lost.
_LAUNCHER_TIMEOUT_S = 60.0


@dataclass
class _HangProbe:
    hang: HangInfo
    since: float
    snapshots: dict[int, RankSnapshot] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    signalled_at: float | None = None


class RankMonitor:
    """Monitors the ranks of one attempt. See `HeartbeatHandler`; only `close` may run in another thread."""

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        step: JobStep,
        send: Callable[[Mapping[str, Any]], int],
        emit: EmitEvent,
        limits: PhaseLimits,
        host_of: Callable[[int], str],
        world_size: int,
    ) -> None:
        self._run, self._attempt, self._step = run, attempt, step
        self._send, self._emit, self._host_of, self._world_size = send, emit, host_of, world_size
        self._stop_agreement = StopAgreement(world_size, send)
        self._hang_detector = HangDetector(limits, system.monotonic())
        self._straggler_detector = StragglerDetector(world_size)
        self._probe: _HangProbe | None = None
        self._stopped = False
        self._empty_since: float | None = None
        self._last_seen = system.monotonic()
        #: Time of the last discounted pause, and end of the last recorded one.
        self._discounted_at = self._recorded_until = -math.inf
        self._modules: dict[int, list[str]] = {}
        #: Environment variables that a rank has changed.
        self.changed: set[str] = set()
        self._reported: set[int] = set()

    def on_message(self, rank: int, message: RankMessage) -> None:
        self._check_for_pause(system.monotonic())
        if message.paused is not None:
            self._on_rank_pause(rank, *message.paused)
        self._hang_detector.on_message(rank, system.monotonic())
        self._stop_agreement.on_message(rank, message)
        if message.beats is not None:
            self._empty_since = None
            now = system.monotonic()
            self._hang_detector.on_heartbeat(rank, message.phase, message.step, message.beats, now)
            times = StepTimes(message.step, *message.spent, *message.timed)
            self._straggler_detector.on_heartbeat(rank, times)
            self._modules[rank] = message.modules
            self.changed.update(message.changed)
        elif message.stop_signal is not None:
            self._emit(RankSignalled(rank, message.stop_signal))
        elif self._probe is not None and message.told is not None:
            self._probe.snapshots[rank] = message.told
        elif self._probe is not None and message.written:
            self._probe.written.add(rank)

    def on_disconnect(self, rank: int) -> None:
        self._hang_detector.ranks.pop(rank, None)
        self._empty_since = None if self._hang_detector.ranks else system.monotonic()

    @property
    def modules(self) -> list[str] | None:
        """Slow imports common to all ranks; None until all ranks have imported PyTorch."""
        if len(self._modules) < self._world_size:
            return None
        imports, *peers = self._modules.values()
        common = [name for name in imports if all(name in modules for modules in peers)]
        return common if "torch" in common else None

    def are_connected(self, ranks: Iterable[int]) -> bool:
        return all(rank in self._hang_detector.ranks for rank in ranks)

    def on_tick(self) -> None:
        now = system.monotonic()
        self._check_for_pause(now)
        if self._stopped:
            return
        if self._empty_since is not None and now - self._empty_since > _LAUNCHER_TIMEOUT_S:
            self._empty_since = now
            # Slurm may be slow; this thread must keep receiving from the ranks.
            system.Thread(target=self._check_launcher, daemon=True).start()
        if self._probe is not None:
            self._probe_ranks(self._probe, now)
        elif (hang := self._hang_detector.find_hang(now)) is not None:
            message = (
                "no rank has made progress for %.0f s (limit %.0f s): requesting stack traces from all ranks"
            )
            log.warning(message, hang.seconds, hang.limit_s)
            self._probe = _HangProbe(hang, now)
            self._send({"tell": True})
        else:
            self._report_stragglers(now)

    def close(self) -> None:
        self._stopped = True

    def _check_for_pause(self, now: float) -> None:
        """Discount the time since the last call if this process was suspended."""
        passed, self._last_seen = now - self._last_seen, now
        if passed > _PAUSE_S:
            self._discount(passed, now)

    def _on_rank_pause(self, rank: int, seconds: float, monotonic_s: float) -> None:
        """Discount and record a pause of a rank, for which the others had to wait, unless already done."""
        now, clock = system.monotonic(), system.time()
        if monotonic_s > _PAUSE_S and now - monotonic_s >= self._discounted_at:
            self._discount(monotonic_s, now)
        # Most ranks report the same pause.
        if seconds > _PAUSE_S and clock - seconds >= self._recorded_until - _PAUSE_S:
            self._recorded_until = clock
            log.info("rank %d on %s was suspended for %.0f s", rank, self._host_of(rank), seconds)
            self._run.log_event("paused", self._attempt, rank=rank, seconds=seconds)

    def _discount(self, seconds: float, now: float) -> None:
        self._discounted_at = now
        self._hang_detector.discount_pause(seconds)
        self._straggler_detector.restart()
        if self._probe is not None:
            self._probe.since += seconds
        if self._empty_since is not None:
            self._empty_since += seconds

    def _probe_ranks(self, probe: _HangProbe, now: float) -> None:
        connected = self._hang_detector.ranks.keys()
        if probe.signalled_at is not None:
            if now - probe.signalled_at >= _SIGNAL_PAUSE_S:
                self._report_hang(probe)
        elif connected <= probe.written:
            self._report_hang(probe)
        elif now - probe.since >= _SNAPSHOT_TIMEOUT_S:
            if connected <= probe.snapshots.keys():
                self._report_hang(probe)
                return
            silent = sorted(connected - probe.snapshots.keys())
            log.warning("no response from %s: sending SIGQUIT", format_ranks(silent))
            probe.signalled_at = now
            # Slurm may be slow; this thread must keep receiving from the ranks.
            system.Thread(target=self._signal, daemon=True).start()

    def _check_launcher(self) -> None:
        """Report a launcher that missed the end of the step and would wait forever."""
        try:
            if not self._step.is_over() or self._stopped:
                return
        except SchedulerError as error:
            log.warning("cannot determine whether the job step has ended: %s", error)
            return
        self._emit(LauncherStuck())

    def _signal(self) -> None:
        try:
            self._step.signal(signal.SIGQUIT)
        except SchedulerError as error:
            log.warning("cannot send SIGQUIT to the ranks: %s", error)

    def _report_hang(self, probe: _HangProbe) -> None:
        self._stopped = True
        silent = sorted(self._hang_detector.ranks.keys() - probe.snapshots.keys())
        missing = blocking_ranks(probe.snapshots, silent)
        cause = describe_hang(probe.hang, probe.snapshots, silent, missing, self._host_of, self._world_size)
        rank = (missing or sorted(self._hang_detector.ranks) or [0])[0]
        self._emit(HangDetected(cause, rank, self._host_of(rank)))

    def _report_stragglers(self, now: float) -> None:
        """Report the first detection of each slow rank, then every `LASTING_WINDOWS` windows."""
        for straggler, times in self._straggler_detector.check_window(now):
            rank, lasting = straggler.rank, times % LASTING_WINDOWS == 0
            if not lasting and rank in self._reported:
                continue
            self._reported.add(rank)
            host, takes = self._host_of(rank), "still takes" if lasting else "takes"
            message = "rank %d on %s %s %.1f times as long per step as most ranks (slow part: %s)"
            log.warning(message, rank, host, takes, straggler.ratio, straggler.part)
            self._run.log_event(
                "straggler",
                self._attempt,
                rank=rank,
                host=host,
                ratio=round(straggler.ratio, 2),
                part=straggler.part,
                lasting=lasting,
                seconds=straggler.own_times.by_part(),
                typical=straggler.typical_times.by_part(),
            )


def describe_hang(
    hang: HangInfo,
    snapshots: Mapping[int, RankSnapshot],
    silent: Sequence[int],
    missing: Sequence[int],
    host_of: Callable[[int], str],
    world_size: int,
) -> str:
    text = f"hung: no rank made progress for {hang.seconds:.0f} s (limit {hang.limit_s:.0f} s)"
    if not snapshots and not silent:
        return f"{text}; no rank has connected to the supervisor in this attempt"
    joining = {rank: snapshot.rendezvous for rank, snapshot in snapshots.items()}
    if waiting := {rank: address for rank, address in joining.items() if address is not None}:
        addresses = sorted(set(waiting.values()))
        places = " and ".join(addresses)
        text += f"; {format_ranks(sorted(waiting))} waiting for the process group at {places}"
        if absent := sorted(set(range(world_size)) - waiting.keys()):
            text += f"; {format_ranks(absent)} not arrived"
        if len(addresses) > 1:
            return f"{text}. Set MASTER_ADDR and MASTER_PORT, or the init_method, equally on all ranks"
    if not missing:
        places = ", ".join(sorted({snapshot.place for snapshot in snapshots.values()})) or "not reported"
        return f"{text}; the rank that the others are waiting for is unknown; positions: {places}"
    culprit = missing[0]
    name = f"rank {culprit} on {host_of(culprit)}"
    if culprit in silent:
        text += f"; {name} is not responding"
    else:
        snapshot = snapshots[culprit]
        steps = pluralize(snapshot.step, "step")
        text += f"; {name} is in {snapshot.place}, phase {snapshot.phase}, after {steps}"
    if len(missing) > 1:
        text += f" (also affected: {format_ranks(missing[1:])})"
    waiting_at = [snapshot.place for rank, snapshot in snapshots.items() if rank not in missing]
    if waiting_at:
        place = max(waiting_at, key=waiting_at.count)
        text += f", with {waiting_at.count(place)} of {len(snapshots) + len(silent)} ranks waiting in {place}"
    return text


class StopAgreement:
    """The supervisor's side of `runtime.stopping.agreed_stop`."""

    def __init__(self, world_size: int, send: Callable[[Mapping[str, Any]], object]) -> None:
        self._world_size, self._send = world_size, send
        self._is_requested = False
        self._steps: dict[int, int | None] = {}
        """Earliest step after which each rank can stop; None for a rank without counted steps."""

    def on_message(self, rank: int, message: RankMessage) -> None:
        if message.stop and not self._is_requested:
            self._is_requested = True
            self._send({"prepare_stop": True})
        elif message.can_stop_after is not UNSET:
            self._steps[rank] = message.can_stop_after
            if len(self._steps) == self._world_size:
                self._send({"stop_after": self._common_step()})

    def _common_step(self) -> int | None:
        steps = [step for step in self._steps.values() if step is not None]
        return max(steps) if len(steps) == self._world_size else None
