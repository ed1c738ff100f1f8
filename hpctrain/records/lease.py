"""Hold a lease on a run's folder, so that only one supervisor trains there.

- Leases are numbered, and the newest is valid. A lease is created atomically with its content by a hard
  link, which only one of several processes can create.
- The holder renews the lease every few seconds. It counts as dead if Slurm reports that its job is not
  running or, if Slurm does not respond, when the last renewal is a minute old on the file system's clock.
- A holder that finds a newer lease was considered dead, and exits.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.files import create_atomic, open_regular
from hpctrain.record_types import LeaseHolder, decode
from hpctrain.rundir import RunDir
from hpctrain.slurm.job_queries import query_job
from hpctrain.slurm.states import RunState, parse_job_state

log = logging.getLogger(__name__)

#: Seconds between renewals of a lease.
RENEW_INTERVAL_S = 10.0
#: Seconds without a renewal after which a holder counts as dead.
EXPIRY_S = 60.0
#: Number of leases to keep. On NFS, other hosts may list old names for a minute: if these names were free
#: again, two processes could create the newest lease.
KEPT_LEASES = 100
#: Seconds after another process was faster.
_CLAIM_PAUSE_S = 1.0
#: A lease is written in one block of this fixed length, for renewals in place.
_BYTES = 512


@dataclass(frozen=True)
class LeaseState:
    """The newest lease of a run at the time of reading."""

    number: int
    holder: LeaseHolder
    age_s: float
    """Seconds since the last renewal."""


class LeaseHeld(Exception):
    """Another process holds the lease, or may hold it."""

    def __init__(self, holder: LeaseHolder) -> None:
        super().__init__(holder.job_id)
        self.holder = holder


class Lease:
    """A lease on a run's folder, held until it is released or this process exits."""

    def __init__(
        self,
        run: RunDir,
        job_id: str,
        start: int,
        environ: Mapping[str, str],
        on_loss: Callable[[LeaseHolder], object],
    ) -> None:
        self._run, self._environ, self._on_loss = run, environ, on_loss
        self._me = LeaseHolder(job_id, start, system.gethostname(), system.getpid())
        self._number: int | None = None
        self._stopped, self._writing = system.Event(), system.Lock()

    def acquire(self, predecessor: str | None = None, deaths: int = 0) -> None:
        """Acquire and renew the lease, also that of one of the `deaths` killed supervisors of this job."""
        deadline = system.monotonic() + EXPIRY_S
        while True:
            held = newest_lease(self._run)
            inherits = held is None or inherits_lease(self._me, held.holder, predecessor, deaths)
            if held and not inherits and is_lease_alive(self._run, held, self._environ):
                raise LeaseHeld(held.holder)
            try:
                if self._claim(held.number + 1 if held else 0):
                    break
            except OSError:
                # Without a newer lease, an expired holder that is alive would not exit.
                if held and not inherits and is_lease_alive(self._run, held, self._environ, math.inf):
                    raise LeaseHeld(held.holder) from None
                raise
            if system.monotonic() > deadline:
                raise LeaseHeld(held.holder if held else LeaseHolder("unknown (lease not listed)"))
            # Network file systems list a new lease of another host late.
            system.sleep(_CLAIM_PAUSE_S)
        system.Thread(target=self._renew, name="hpctrain-lease", daemon=True).start()

    def release(self) -> None:
        """Release the lease if it is held."""
        self._stopped.set()
        with self._writing:
            number, self._number = self._number, None
            if number is not None:
                with suppress(OSError):
                    self._write_holder(number, replace(self._me, released=True))

    def _claim(self, number: int) -> bool:
        """Create the lease with this number. Return False if another process was faster."""
        if not create_atomic(
            self._run.lease(number), encode_holder(self._me), f"{self._me.host}.{self._me.pid}"
        ):
            return False
        self._number = number
        for older in self._run.leases()[:-KEPT_LEASES]:
            self._run.lease(older).unlink(missing_ok=True)
        return True

    def _renew(self) -> None:
        while not self._stopped.wait(RENEW_INTERVAL_S):
            try:
                newer = self._renew_once()
            except OSError as error:
                log.warning("cannot renew the lease on the run folder: %s", error)
                continue
            if newer is not None:
                self._stopped.set()
                self._on_loss(newer)
                return

    def _renew_once(self) -> LeaseHolder | None:
        """Renew the lease unless it was released. Return the holder of a newer lease."""
        with self._writing:
            if self._number is None:
                return None
            newest = max(self._run.leases(), default=-1)
            if newest > self._number and (newer := newest_lease(self._run)):
                return newer.holder
            self._me = replace(self._me, beat=self._me.beat + 1)
            self._write_holder(self._number, self._me)
            return None

    def _write_holder(self, number: int, holder: LeaseHolder) -> None:
        # Written in place: other hosts see new content of a file sooner than a new file of the same name.
        fd = os.open(self._run.lease(number), os.O_WRONLY)
        try:
            os.pwrite(fd, encode_holder(holder), 0)
        finally:
            os.close(fd)


def encode_holder(holder: LeaseHolder) -> bytes:
    return json.dumps(structs.asdict(holder)).ljust(_BYTES - 1).encode() + b"\n"


def inherits_lease(me: LeaseHolder, holder: LeaseHolder, predecessor: str | None, deaths: int) -> bool:
    """Return True if the holder must have ended before this process, `me`, started. See `Lease.acquire`."""
    if holder.job_id == me.job_id:
        return deaths > 0 or holder.start < me.start
    return holder.job_id == predecessor


def newest_lease(run: RunDir) -> LeaseState | None:
    """Return the newest lease on the run's folder, or None."""
    numbers = run.leases()
    if not numbers:
        return None
    path = run.lease(numbers[-1])
    with open_regular(path) as file:
        text, renewed = file.read(), os.fstat(file.fileno()).st_mtime
    try:
        holder = decode(text, LeaseHolder)
    except ValueError:
        holder = LeaseHolder("unknown (unreadable lease)")
    return LeaseState(numbers[-1], holder, _now(path.parent) - renewed)


def is_lease_alive(
    run: RunDir, held: LeaseState, environ: Mapping[str, str], expiry_s: float = EXPIRY_S
) -> bool:
    """True if the holder of the lease is alive, or may be."""
    if held.holder.released:
        return False
    try:
        state = parse_job_state(query_job(held.holder.job_id, environ).state)
    except SchedulerError as error:
        log.info("cannot determine the state of job %s: %s", held.holder.job_id, error)
        state = RunState.UNKNOWN
        # The query took up to a minute, in which the holder may have renewed the lease.
        held = newest_lease(run) or held
    return counts_as_alive(held, state, expiry_s)


def counts_as_alive(held: LeaseState, state: RunState, expiry_s: float = EXPIRY_S) -> bool:
    """Return True if the holder of the lease may be alive, given the state of its job in Slurm."""
    if held.holder.released:
        return False
    if state is RunState.UNKNOWN:
        return held.age_s < expiry_s
    return state is RunState.RUNNING


def _now(folder: Path) -> float:
    """Return the current time on the clock of the folder's file system, even if the disk is full."""
    os.utime(folder)
    return folder.stat().st_mtime
