"""Status of many jobs' runs, through submitit's watcher interface."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from submitit.core.core import InfoWatcher

from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.runs.status_poller import StatusPoller
from hpctrain.records.run_record import read_run_record
from hpctrain.slurm.states import RunState


class RunWatcher(InfoWatcher):
    """Cache of runs' statuses. Each scheduler is queried once for all runs.

    An end is read from the run's own record. Runs are identified by the paths of their folders, because
    schedulers reuse job ids.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Needed because callers wait for jobs in threads.
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._poller = StatusPoller([], {})
        self._watched: list[str] = []

    def follow(self, run: Run) -> None:
        """Include `run` in later queries."""
        key = str(run.dir.path)
        with self._lock:
            self._runs.setdefault(key, run)
            if key not in self._registered:
                self.register_job(key)

    def status(self, run: Run, mode: str = "standard") -> RunStatus | None:
        """Return the run's status, possibly cached, so as not to overload the scheduler."""
        self.follow(run)
        key = str(run.dir.path)
        with self._lock:
            self.update_if_long_enough(mode)
            if mode != "cache" and key not in self._finished and read_run_record(run.dir).finished:
                self._learn([key], StatusPoller([run.dir], run.environ))
            return self._statuses.get(key)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State", RunState.UNKNOWN.value)

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        status = self.status(self._runs[job_id], mode)
        return {} if status is None else {"JobID": status.job_id or "", "State": status.state.value}

    def update_if_long_enough(self, mode: str) -> None:
        if mode == "force" or (
            mode == "standard" and time.time() - self._last_status_check >= self._poller.poll_s
        ):
            self.update()

    def update(self) -> None:
        """Query all runs that have not ended."""
        with self._lock:
            going = [key for key in self._runs if key not in self._finished]
            if going != self._watched:
                self._poller = StatusPoller([self._runs[key].dir for key in going], os.environ)
                self._watched = going
            self._num_calls += 1
            self._learn(going, self._poller)
            self._last_status_check = time.time()

    def _learn(self, keys: Sequence[str], poller: StatusPoller) -> None:
        for key, status in zip(keys, poller.look(), strict=True):
            self._statuses[key] = status
            if status.state.ended:
                self._finished.add(key)
