"""Copy the state of training to the memory of the nodes, as often as its cost allows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpctrain.checkpoint.interval import CopyInterval
from hpctrain.checkpoint.io.coordination import RankCoordinator
from hpctrain.checkpoint.store import IO_TIMEOUT_S
from hpctrain.checkpoint.tier.local_tier import tier_folder
from hpctrain.checkpoint.tier.memory_copies import MemoryCopies
from hpctrain.files import is_locked, make_private_folder
from hpctrain.records.lease import counts_as_alive, newest_lease
from hpctrain.rundir import ATTEMPT_VARIABLE, VERIFY_STEPS_VARIABLE, RunDir
from hpctrain.slurm.states import RunState
from hpctrain.training.base import rng
from hpctrain.training.components import Components

_SHARED_MEMORY = Path("/dev/shm")
#: Link to the run in its folder in memory.
_RUN_LINK = "run"


class StateCopies:
    def __init__(
        self, components: Components, environ: Mapping[str, str], *, was_out_of_memory: bool
    ) -> None:
        """Collective. Decide whether the run makes copies."""
        self._parts, self._limit = components, components.settings.memory_copies
        self._attempt = int(environ.get(ATTEMPT_VARIABLE, "0"))
        self.folder: Path | None = None
        self._copies: MemoryCopies | None = None
        self._interval = CopyInterval(None)
        self._is_enabled, self._has_announced = False, False
        self._last_step, self._last_end, self._waited_s = 0, 0.0, 0.0
        # Without a supervisor, nothing would remove the copies of killed ranks.
        is_supervised = ATTEMPT_VARIABLE in environ and VERIFY_STEPS_VARIABLE not in environ
        usable = is_supervised and components.log.run is not None and _SHARED_MEMORY.is_dir()
        if self._limit is False or not all(components.context.all_gather(usable)):
            return
        assert components.log.run is not None
        name = f"{tier_folder(Path(), components.log.run.checkpoints).name}-copies"
        self.folder = _SHARED_MEMORY / name
        algorithm = components.strategy.algorithm
        # With other algorithms, a copy would synchronize the replicas.
        self._is_enabled = (algorithm is None or algorithm.shares_gradients) and not was_out_of_memory
        if components.context.ranks.local_rank == 0:
            _remove_abandoned(_SHARED_MEMORY, components.log.run)
            if self._attempt == 0:  # a deleted run in the same run folder may have left copies
                shutil.rmtree(self.folder, ignore_errors=True)
        components.context.barrier()

    def restart(self) -> None:
        """Collective. Prepare for copies after a checkpoint was loaded, and remove all earlier ones."""
        self._last_step, self._last_end = self._parts.state.step, time.monotonic()
        if self._copies is not None:
            self._copies.clear()
            self._parts.context.barrier()
        if not self._is_enabled or self._copies is not None:
            return
        assert self.folder is not None
        problem = None
        try:
            make_private_folder(self.folder)
            with suppress(FileExistsError):
                assert self._parts.log.run is not None
                (self.folder / _RUN_LINK).symlink_to(self._parts.log.run.path.resolve())
        except OSError as error:
            problem = str(error)
        if problem := next(filter(None, self._parts.context.all_gather(problem)), None):
            self._disable(problem)
            return
        coordinator = RankCoordinator(self._parts.context.cpu_group is not None, IO_TIMEOUT_S)
        self._copies = MemoryCopies(self.folder, coordinator, self._attempt)
        if self._limit is not True:
            # A failure may interrupt a copy that is sent to another node, or comes from a GPU.
            in_background = self._copies.has_neighbors or self._parts.context.device.type != "cpu"
            self._interval = CopyInterval(max(1, self._limit // 2) if in_background else self._limit)

    def _disable(self, problem: str) -> None:
        self._is_enabled = False
        self._parts.progress.print_message(f"hpctrain: the state is not copied to memory: {problem}")

    def due(self) -> bool:
        state, due_step = self._parts.state, self._last_step + self._interval.every
        return self._is_enabled and self._copies is not None and not state.finished and state.step >= due_step

    @property
    def wanted(self) -> int:
        """Steps between two copies that rank 0 has chosen; 0 on other ranks."""
        return self._interval.wanted if self._parts.context.ranks.is_main else 0

    def set_every(self, num_steps: int) -> None:
        if num_steps:
            self._interval.every = num_steps

    def wait(self) -> None:
        if self._copies is not None:
            begun = time.monotonic()
            self._copies.wait()
            self._waited_s = time.monotonic() - begun

    def copy(self, begun: float) -> None:
        """Collective. Copy the state; `begun` is the CPU time of this thread at which the work began."""
        state, copies = self._parts.state, self._copies
        assert copies is not None
        num_steps = state.step - self._last_step
        step_s = (time.monotonic() - self._last_end) / num_steps
        copies.copy(state.step, state.tree(), rng.capture_rng_state(), state.verified_step)
        self._last_step, self._last_end = state.step, time.monotonic()
        cost_s = time.thread_time() - begun + copies.gpu_s + self._waited_s
        if self._parts.context.device.type == "cpu":  # the exchange needs the CPUs that compute
            cost_s += copies.exchange_s
        self._interval.on_copied(cost_s, step_s)
        if copies.problem is not None:
            self._disable(copies.problem)
        elif copies.failure is not None:
            self._parts.progress.print_message(f"hpctrain: a copy in memory failed: {copies.failure}")
            copies.failure = None
        elif not self._has_announced:
            self._has_announced = True
            self._announce(copies)

    def _announce(self, copies: MemoryCopies) -> None:
        sent = copies.num_bytes if copies.has_neighbors else 0
        memory = 2 * copies.num_bytes + 2 * sent
        self._parts.log.write_event(
            "memory_copy",
            step=self._last_step,
            path=str(self.folder),
            tier="local",
            bytes=copies.num_bytes,
            seconds=time.monotonic() - self._last_end,
            every_steps=self._interval.every,
            memory_bytes=memory,
            sent_bytes=sent,
        )

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
            self._copies = None


def _remove_abandoned(memory: Path, current_run: RunDir) -> None:
    """Remove this user's folders of runs that were killed and have not used this node since."""
    for folder in memory.glob("hpctrain-*-copies"):
        with suppress(OSError):
            run = RunDir((folder / _RUN_LINK).readlink())
            if run.path == current_run.path.resolve() or folder.lstat().st_uid != os.geteuid():
                continue
            held = newest_lease(run)
            # A container may not have the folder of the runs.
            is_deleted = run.path.parent.exists() and not run.path.exists()
            # Local runs have a lock, and no lease. A job on a full disk has neither.
            has_ended = is_deleted or (run.lock.exists() and not is_locked(run.lock))
            if has_ended if held is None else not counts_as_alive(held, RunState.UNKNOWN):
                shutil.rmtree(folder)
