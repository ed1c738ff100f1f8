"""Who trains in a run's folder: a lease that the supervisor holds there, and renews as long as it lives.

The record of a run tells what was submitted, and may be wrong about what runs. A lease is held by a process.

- Leases are numbered, and the newest counts. It comes into being with what it holds, by a link, which of
  several processes only one can make.
- The holder renews it every few seconds. It is dead where Slurm says that its job does not run, or where it
  has not renewed the lease for a minute: by the clock of the file system, on which both times are taken.
- A holder that finds a newer lease than its own has been taken for dead, and ends.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.jobs.slurm_command import job_fields
from hpctrain.jobs.states import RunState, from_slurm
from hpctrain.rundir import RunDir

log = logging.getLogger(__name__)

#: How often a lease is renewed.
RENEW_S = 10.0
#: A holder that has not done so for this long is dead.
DEAD_S = 60.0
#: What a lease holds is written in one piece of this length, so that it is renewed in place.
_BYTES = 512


@dataclass(frozen=True)
class Holder:
    """Who holds a lease."""

    job_id: str
    start: int = 0
    """How often Slurm had started that job before."""
    host: str = ""
    pid: int = 0
    beat: int = 0
    """How often the lease was renewed."""
    released: bool = False

    def text(self) -> bytes:
        return json.dumps(asdict(self)).ljust(_BYTES - 1).encode() + b"\n"


@dataclass(frozen=True)
class Held:
    """The newest lease of a run, as somebody found it."""

    number: int
    holder: Holder
    age_s: float
    """Seconds since it was renewed."""


class Taken(Exception):
    """Another process holds the lease, or may."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(holder.job_id)
        self.holder = holder


class Lease:
    """A lease on a run's folder, held as long as this process lives or until it is released."""

    def __init__(
        self,
        run: RunDir,
        job_id: str,
        start: int,
        environ: Mapping[str, str],
        on_loss: Callable[[Holder], object],
    ) -> None:
        """Say who wants the lease; nothing is taken yet.

        Args:
            run: the run.
            job_id: the job of this process.
            start: how often Slurm had started it before.
            environ: variables that Slurm's commands run under.
            on_loss: gets the new holder where this one was taken for dead.
        """
        self._run, self._environ, self._on_loss = run, environ, on_loss
        self._me = Holder(job_id, start, socket.gethostname(), os.getpid())
        self._number: int | None = None
        self._over = threading.Event()

    def take(self, predecessor: str | None = None, deaths: int = 0) -> None:
        """Take the lease, and renew it from now on.

        Args:
            predecessor: the job that this one continues, and whose end Slurm has waited for.
            deaths: how many supervisors of this job were killed before.

        Raises:
            Taken: another process holds it.
            OSError: the folder cannot be written.
        """
        while True:
            held = newest_lease(self._run)
            inherits = held is None or self._inherits(held.holder, predecessor, deaths)
            if held and not inherits and is_alive(held, self._environ):
                raise Taken(held.holder)
            if self._claim(held.number + 1 if held else 0):
                break
        threading.Thread(target=self._renew, name="hpctrain-lease", daemon=True).start()

    def release(self) -> None:
        """Give the lease back; nothing is done where it is not held."""
        self._over.set()
        if self._number is not None:
            with suppress(OSError):
                self._write(replace(self._me, released=True))
            self._number = None

    def _inherits(self, holder: Holder, predecessor: str | None, deaths: int) -> bool:
        """Whether the holder must have ended before this process was started."""
        if holder.job_id == self._me.job_id:
            return deaths > 0 or holder.start < self._me.start
        return holder.job_id == predecessor

    def _claim(self, number: int) -> bool:
        """Make the lease of this number. Returns False where somebody else was faster."""
        lease = self._run.lease(number)
        lease.parent.mkdir(exist_ok=True)
        mine = lease.with_name(f".{lease.name}.{self._me.host}.{self._me.pid}")
        mine.write_bytes(self._me.text())
        try:
            os.link(mine, lease)
        except FileExistsError:
            return False
        finally:
            mine.unlink()
        self._number = number
        for older in self._run.leases()[:-2]:
            self._run.lease(older).unlink(missing_ok=True)
        return True

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            if self._has_newer() and (newer := newest_lease(self._run)):
                self._over.set()
                self._on_loss(newer.holder)
                return
            self._me = replace(self._me, beat=self._me.beat + 1)
            try:
                self._write(self._me)
            except OSError as error:
                log.warning("the lease on the run's folder cannot be renewed: %s", error)

    def _has_newer(self) -> bool:
        return self._number is not None and max(self._run.leases(), default=-1) > self._number

    def _write(self, holder: Holder) -> None:
        # In place: who looks from another host sees a file's new content sooner than a new file of its name.
        fd = os.open(self._run.lease(self._number or 0), os.O_WRONLY)
        try:
            os.pwrite(fd, holder.text(), 0)
        finally:
            os.close(fd)


def newest_lease(run: RunDir) -> Held | None:
    """The newest lease on the run's folder, where it was not given back; None where nobody holds one.

    Raises:
        OSError: it cannot be read.
    """
    numbers = run.leases()
    if not numbers:
        return None
    path = run.lease(numbers[-1])
    with open(path, "rb") as file:
        text, renewed = file.read(), os.fstat(file.fileno()).st_mtime
    try:
        holder = Holder(**json.loads(text))
    except (ValueError, TypeError):
        holder = Holder("of which nothing can be read")
    return Held(numbers[-1], holder, _now(path.parent) - renewed)


def is_alive(held: Held, environ: Mapping[str, str]) -> bool:
    """Whether the holder of a lease is there, or may be.

    Args:
        held: the lease.
        environ: variables that Slurm's commands run under.
    """
    if held.holder.released:
        return False
    try:
        state = from_slurm(job_fields(held.holder.job_id, environ).get("JobState", ""))
    except SchedulerError as error:
        log.info("what has become of job %s cannot be told: %s", held.holder.job_id, error)
        state = RunState.UNKNOWN
    if state is RunState.UNKNOWN:
        return held.age_s < DEAD_S
    return state is RunState.RUNNING


def _now(folder: Path) -> float:
    """The time, by the clock that gives files of the folder theirs."""
    probe = folder / f".now.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
    try:
        with open(probe, "wb") as file:
            file.write(b"\n")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)
