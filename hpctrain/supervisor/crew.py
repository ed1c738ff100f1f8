"""The ranks over all attempts of a job: lines to them, what is learned of them, those in reserve."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from hpctrain.errors import HpctrainError
from hpctrain.files import write_atomic
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor.command import command_of
from hpctrain.supervisor.contact import Contact
from hpctrain.supervisor.lines import Lines
from hpctrain.supervisor.liveness import Limits
from hpctrain.supervisor.reserve import Reserve
from hpctrain.supervisor.step import Emit, Launcher, Step

log = logging.getLogger(__name__)


class Crew:
    """Starts the ranks of an attempt, from the reserve where there is one, and listens to them.

    Use as a context manager: at its end nobody waits any more. `start` and `end` are called in turn, from one
    thread; the ranks are heard in another.
    """

    def __init__(self, run: RunDir, spec: JobSpec, launcher: Launcher) -> None:
        self._run, self._spec, self._launcher = run, spec, launcher
        self._lines: Lines
        self._limits = Limits(spec.hang_limit_s, _read_pace(run))
        self._lock = threading.Lock()
        self._attempt = -1
        self._contact: Contact | None = None
        self._reserve: Reserve | None = None
        self._reserve_from: Callable[[int], Mapping[str, str]] | None = None
        self._imported_at: float | None = None
        self._modules: list[str] = []
        self._has_reserve = False

    def __enter__(self) -> Self:
        self._lines = Lines(self._launcher.address, self)
        self._lines.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # First nobody looks any more, so that no reserve is begun; and the workers that wait see their line
        # end.
        self._lines.__exit__(kind, error, trace)
        self._dismiss()

    def start(
        self,
        attempt: int,
        met_at: Mapping[str, str],
        variables: Callable[[int], Mapping[str, str]],
        emit: Emit,
    ) -> Step:
        """Start the ranks of an attempt.

        Args:
            attempt: its number.
            met_at: variables that tell where the ranks meet.
            variables: all others, of the attempt with this number.
            emit: takes events.
        """
        spec, hosts = self._spec, list(self._launcher.hosts)
        known = {**met_at, **variables(attempt)}
        step = self._from_reserve(attempt, hosts, known, emit)
        if step is None:
            command = command_of(spec, len(hosts))
            step = self._launcher.start(command, {**known, **self._lines.variables}, emit)
        contact = Contact(
            self._run,
            attempt,
            step,
            lambda: self._lines.tell(attempt, {"tell": True}),
            emit,
            self._limits,
            lambda rank: hosts[rank // spec.tasks_per_node],
            len(hosts) * spec.tasks_per_node,
        )
        with self._lock:
            self._attempt, self._contact, self._reserve_from = attempt, contact, variables
            self._imported_at, self._has_reserve = None, False
        return step

    def end(self) -> None:
        """The ranks of the attempt are gone, or about to be ended."""
        with self._lock:
            contact, self._contact = self._contact, None
        if contact is not None:
            contact.close()
        with suppress(OSError):
            write_atomic(self._run.pace, json.dumps(self._limits.longest_s) + "\n", durable=False)

    def hear(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        """See `Listener`."""
        with self._lock:
            contact = self._contact if attempt == self._attempt else None
            reserve = self._reserve if self._reserve and self._reserve.attempt == attempt else None
        if contact is not None:
            contact.hear(rank, message)
        elif reserve is not None:
            reserve.hear(rank, message)

    def hung_up(self, attempt: int, rank: int) -> None:
        """See `Listener`."""
        with self._lock:
            contact = self._contact if attempt == self._attempt else None
        if contact is not None:
            contact.hung_up(rank)

    def look(self) -> None:
        """See `Listener`."""
        with self._lock:
            contact = self._contact
        if contact is not None:
            contact.look()
            self._make_reserve(contact)

    def _from_reserve(
        self, attempt: int, hosts: list[str], known: Mapping[str, str], emit: Emit
    ) -> Step | None:
        with self._lock:
            reserve, self._reserve = self._reserve, None
        if reserve is None:
            return None
        if reserve.can_go(attempt, hosts):
            return reserve.go(known, emit)
        reserve.close()
        return None

    def _make_reserve(self, contact: Contact) -> None:
        """Have workers wait for the next attempt, once the ranks of this one have trained for a while."""
        after_s = self._spec.warm_workers_s
        if after_s is None or self._spec.torchrun is not None or self._has_reserve:
            return
        if (modules := contact.modules) is None:
            return
        now = time.monotonic()
        if self._imported_at is None or modules != self._modules:
            # What is imported late, in the first step perhaps, takes long, too.
            self._imported_at, self._modules = now, modules
        if now - self._imported_at < after_s:
            return
        self._has_reserve = True
        if changed := contact.changed:
            log.info(
                "no workers wait: the script itself sets %s, which imports may read; use --env for it",
                ", ".join(changed),
            )
            return
        with self._lock:
            if self._contact is not contact or self._reserve_from is None:
                return
            attempt, of_attempt = self._attempt + 1, self._reserve_from
            hosts = len(self._launcher.hosts)
            variables = {**of_attempt(attempt), **self._lines.variables}
            command, ranks = command_of(self._spec, hosts), hosts * self._spec.tasks_per_node
            try:
                self._reserve = Reserve(self._launcher, self._lines, command, variables, modules, ranks)
            except (OSError, HpctrainError) as error:
                log.warning("no workers wait: %s", error)

    def _dismiss(self) -> None:
        with self._lock:
            reserve, self._reserve = self._reserve, None
        if reserve is not None:
            reserve.close()


def _read_pace(run: RunDir) -> dict[str, float]:
    """What earlier jobs of the run have learned."""
    try:
        record = json.loads(run.pace.read_text(encoding="utf-8"))
        return {str(phase): float(seconds) for phase, seconds in record.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
