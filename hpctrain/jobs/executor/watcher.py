"""Where the runs of many jobs stand, as submitit asks for it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence

from submitit.core.core import InfoWatcher

from hpctrain.jobs.record import read_record
from hpctrain.jobs.runs import Run
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.watch import Watcher


class RunWatcher(InfoWatcher):
    """Knows where runs stand. Each scheduler is asked once for all of them.

    An end is read from the run's own record. Holds that Slurm puts on requeued jobs are lifted on the way.
    Runs go by the paths of their folders: a scheduler gives its numbers again some day.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Jobs are waited for in threads.
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._statuses: dict[str, RunStatus] = {}
        self._watcher = Watcher([], {})
        self._watched: list[str] = []

    def follow(self, run: Run) -> None:
        """Look at `run`, too, from now on."""
        key = str(run.dir.path)
        with self._lock:
            self._runs.setdefault(key, run)
            if key not in self._registered:
                self.register_job(key)

    def status(self, run: Run, mode: str = "standard") -> RunStatus | None:
        """Where the run stands, or stood at the last look where another would burden the scheduler."""
        self.follow(run)
        key = str(run.dir.path)
        with self._lock:
            self.update_if_long_enough(mode)
            if mode != "cache" and key not in self._finished and read_record(run.dir).finished:
                self._learn([key], Watcher([run.dir], run.environ))
            return self._statuses.get(key)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State", RunState.UNKNOWN.value)

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        status = self.status(self._runs[job_id], mode)
        return {} if status is None else {"JobID": status.job_id or "", "State": status.state.value}

    def update_if_long_enough(self, mode: str) -> None:
        if mode == "force" or (
            mode == "standard" and time.time() - self._last_status_check >= self._watcher.poll_s
        ):
            self.update()

    def update(self) -> None:
        """Look at all runs that have not ended."""
        with self._lock:
            going = [key for key in self._runs if key not in self._finished]
            if going != self._watched:
                self._watcher = Watcher([self._runs[key].dir for key in going], os.environ)
                self._watched = going
            self._num_calls += 1
            self._learn(going, self._watcher)
            self._last_status_check = time.time()

    def _learn(self, keys: Sequence[str], watcher: Watcher) -> None:
        for key, status in zip(keys, watcher.look(), strict=True):
            self._statuses[key] = status
            if status.state.ended:
                self._finished.add(key)
            elif status.held:
                self._runs[key].lift_hold()
