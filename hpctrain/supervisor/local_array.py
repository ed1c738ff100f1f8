"""Run the tasks of a job array without Slurm, as local processes with limited concurrency."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType

from hpctrain import system
from hpctrain.cluster.visible_gpus import gpu_variables
from hpctrain.errors import RunFailed
from hpctrain.files import own_file, try_lock
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.records.run_record import read_run_record
from hpctrain.rundir import BATCH_PID_VARIABLE, STOPPED_EARLY, RunDir
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.srun_step import TaskExit
from hpctrain.supervisor.acquire_run import register_job
from hpctrain.supervisor.launch.step_launchers import visible_gpus
from hpctrain.supervisor.run_end import finish_run

log = logging.getLogger(__name__)

#: Signals with which the user cancels the array.
_CANCELS = (signal.SIGTERM, signal.SIGINT)


class LocalArray:
    """Starts a supervisor for each task, up to the concurrency limit of the array."""

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        assert spec.array is not None
        self._run, self._spec, self._environ = run, spec, environ
        self._job_id = environ.get(BATCH_PID_VARIABLE) or str(system.getpid())
        self._array = JobArray.parse(spec.array)
        self._events: system.SimpleQueue[int | signal.Signals] = system.SimpleQueue()
        self._running: dict[int, tuple[system.Popen[bytes], int]] = {}
        """The supervisor and the slot of each running task."""
        self._free_slots = deque(range(self._array.throttle or 1))
        self._cancelled = False

    def run(self) -> int:
        for number in (*_CANCELS, signal.SIGUSR2):
            system.handle_signal(number, self._on_signal)
        register_job(self._run, self._spec, self._job_id)
        waiting = deque(self._array.indices)
        while waiting or self._running:
            while waiting and self._free_slots:
                self._start(waiting.popleft())
            if not self._running:
                continue
            event = self._events.get()
            if isinstance(event, signal.Signals):
                self._forward_signal(event, waiting)
            else:
                self._has_ended(event)
        states = [self._state(index) for index in self._array.indices]
        log.info("all tasks have ended: %s", ", ".join(map(str, states)))
        return 0 if set(states) <= {"COMPLETED", STOPPED_EARLY} else RunFailed.exit_code

    def _start(self, index: int) -> None:
        task = self._run.task(index)
        if self._cancelled or task.cancel_request.exists():
            finish_run(task, "CANCELLED")
            return
        lock = try_lock(task.lock)
        if lock is None:
            log.warning("task %d is already running under an earlier supervisor", index)
            return
        slot = self._free_slots.popleft()
        try:
            with open(task.slurm_log, "ab", opener=own_file) as output:
                process = system.Popen(
                    [self._spec.python, "-m", "hpctrain.supervisor", str(task.path)],
                    cwd=task.path,
                    env={**self._environ, **self._gpus_of(slot)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=[lock],
                )
            with suppress(OSError):  # On a full disk, the lock file lacks only the owner's pid.
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{process.pid}\n".encode(), 0)
        finally:
            os.close(lock)
        self._running[index] = process, slot
        system.Thread(target=self._wait_for_task, args=(index, process), daemon=True).start()
        log.info("task %d: started process %d", index, process.pid)

    def _gpus_of(self, slot: int) -> dict[str, str]:
        count = self._spec.nodes * self._spec.gpus_per_node
        return gpu_variables(visible_gpus(self._environ)[slot * count : (slot + 1) * count])

    def _wait_for_task(self, index: int, process: system.Popen[bytes]) -> None:
        process.wait()
        self._events.put(index)

    def _forward_signal(self, number: signal.Signals, waiting: Iterable[int]) -> None:
        log.info("received %s; sending it to the running tasks", number.name)
        if number in _CANCELS:
            self._cancelled = True
            for index in (*self._running, *waiting):
                with suppress(OSError):
                    self._run.task(index).cancel_request.touch(0o644)
        for process, _ in self._running.values():
            process.send_signal(number)

    def _has_ended(self, index: int) -> None:
        process, slot = self._running.pop(index)
        self._free_slots.append(slot)
        if self._state(index) is None:
            task = self._run.task(index)
            if task.cancel_request.exists():
                finish_run(task, "CANCELLED")
            else:
                end = TaskExit.from_returncode(index, process.returncode)
                finish_run(task, "FAILED", f"the supervisor of this task {end} without reporting a cause")
        log.info("task %d: %s", index, self._state(index))

    def _state(self, index: int) -> str | None:
        finished = read_run_record(self._run.task(index)).finished
        return finished.state if finished else None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._events.put(signal.Signals(number))
