"""Saving during training, resuming from a checkpoint, and exiting after a stop signal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from torch import nn

from hpctrain.checkpoint.format.manifest import Manifest, committed_steps
from hpctrain.checkpoint.format.state_tree import STATE_KEY
from hpctrain.checkpoint.interval import NODE_MTBF_S, SAVE_MARGIN_S, InterruptionHistory, longest_save_s
from hpctrain.checkpoint.io.checkpoint_dir import KEEP_ALL
from hpctrain.checkpoint.store import CheckpointStore, LoadedCheckpoint
from hpctrain.errors import EXIT_CONTINUE, BadLoss, CheckpointError, SilentCorruption, UserError
from hpctrain.rundir import (
    NODE_MTBF_VARIABLE,
    REQUEUE_GRACE_KEY,
    VERIFIED_STEP_VARIABLE,
    checkpoint_folder_name,
)
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.signal_recorder import read_stop_grace
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.base import rng
from hpctrain.training.components import Components
from hpctrain.training.observe.loss_guard import read_excluded_steps
from hpctrain.training.saving.checkpoint_manager import MAX_SAVE_S, CheckpointManager
from hpctrain.training.saving.checkpoint_schedule import CheckpointSchedule, VerificationSteps
from hpctrain.training.saving.state_copies import StateCopies
from hpctrain.training.saving.unsaved_objects import UnsavedNumbers


class TrainingCheckpoints:
    """Checkpoints of a training run; a save in flight is completed on exit, but aborted after an error."""

    def __init__(self, components: Components, environ: Mapping[str, str]) -> None:
        """Collective."""
        run, history = components.log.run, None
        excluded_steps, was_out_of_memory = list[int](), False
        if run is not None:
            run.check_records()
            if components.context.ranks.is_main:
                recorded = list(run.read_events())
                history = InterruptionHistory.from_events(recorded)
                excluded_steps = read_excluded_steps(recorded)
                was_out_of_memory = any(event.end_kind == "oom" for event in recorded)
            excluded_steps, was_out_of_memory = components.context.broadcast_from_main(
                (excluded_steps, was_out_of_memory)
            )
            components.state.loss_guard.excluded_steps.update(excluded_steps)
        self._parts, self._state, self._settings = components, components.state, components.settings
        self._context, self._log, self._progress = components.context, components.log, components.progress
        self._deadline = StopDeadline(environ, components.stop)
        self._verification = VerificationSteps.from_env(environ)
        checkpoint_every = components.settings.checkpoint_every
        self._schedule = CheckpointSchedule(
            None if self._verification and checkpoint_every == "auto" else checkpoint_every,
            num_nodes=components.context.ranks.num_nodes,
            node_mtbf_s=_node_mtbf_s(environ),
            history=history,
        )
        checked = is_trained({"module": components.module, "optimizers": None})
        self.copies = StateCopies(components, environ, was_out_of_memory=was_out_of_memory)
        self._has_resumed = False
        self._manager: CheckpointManager | None = None
        self._prepared = False
        limit = environ.get(VERIFIED_STEP_VARIABLE)
        self._resume_limit = int(limit) if limit else None
        if run is not None:
            store = CheckpointStore(
                run.checkpoints,
                components.context.cpu_group,
                retention=KEEP_ALL if self._verification else components.settings.retention,
                second_tier=None if self._verification else components.settings.second_tier(environ),
                records=(run.metrics, run.events),
                checked=checked,
            )
            self._manager = CheckpointManager(components, store, self._schedule, run.checkpoints)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All ranks raise these errors together.
        ends_together = kind is None or issubclass(kind, (BadLoss, SilentCorruption))
        if ends_together or issubclass(kind or BaseException, SystemExit):
            self.copies.close()
        if self._manager is None:
            return
        if ends_together:
            self._manager.close()
        else:
            self._manager.abandon()
        self._log.flush()

    def save_requested(self) -> bool:
        """Record completed saves; return true if this rank requests a checkpoint soon (collective)."""
        if self._manager is None:
            return False
        if not self._prepared:  # optimizers have a state only after the first step
            self._prepared = True
            self._manager.prepare()
        self._manager.collect_finished()
        return self._context.ranks.is_main and self._schedule.is_due_by_time()

    def due(self) -> bool:
        """Return true if a checkpoint is due after this step: by number, for its score, or at the end."""
        state = self._state
        if self._verification is not None:
            steps = self._verification.saved | self._verification.synced
            return state.finished or state.step in steps or self._schedule.is_due_by_step(state.step)
        scored = self._settings.keep_best > 0 and state.validated_step == state.step > 0
        return state.finished or scored or self._schedule.is_due_by_step(state.step)

    def save(self) -> None:
        """Save the state after this step; only a failure after the last step is an error (collective)."""
        if self._manager is None:
            return
        if self._state.finished:
            self._manager.save_result(self._left_to_begin_s)
        elif self._verification is not None and self._state.step == self._verification.last:
            self._manager.save_result(self._left_to_begin_s)
            self._manager.close()
            assert self._log.run is not None
            self._verification.end_run(self._log.run, self._context)
        elif self._verification is None or self._state.step in self._verification.saved:
            is_main = self._context.ranks.is_main
            if self._context.broadcast_from_main(is_main and self._manager.can_begin()):
                self._manager.async_save()
                if not self._settings.checkpoint_async:
                    self._manager.wait()
                    self._manager.collect_finished()

    def _left_to_begin_s(self) -> float:
        """Return the seconds until a save must begin in order to complete before this rank is killed."""
        for_requeue = self._log.is_asked_to_requeue()
        write_s = None if self._manager is None else self._manager.write_s
        return self._deadline.left_s(for_requeue=for_requeue) - longest_save_s(write_s or 0.0)

    def resume(self) -> None:
        """Collective."""
        if self._manager is None:
            return
        self._manager.check()
        begun = time.monotonic()
        aside: list[str] = []
        if self._resume_limit is not None:
            # A later rollback may use the checkpoints of this attempt.
            aside = self._manager.store.set_aside_after(self._resume_limit)
        if not self._has_resumed and self.copies.folder is not None:
            problem = self._manager.store.commit_newest_copy(self.copies.folder, self._resume_limit)
            aside += [problem] if problem else []
        if not self._has_resumed and self._context.ranks.is_main:
            self._manager.unsaved_numbers = UnsavedNumbers([self._parts.module], self._parts.callbacks)
        self._resume_limit, self._has_resumed = None, True
        loaded, broken = self._manager.store.load_newest(self._state.template())
        for sentence in (*aside, *broken):
            self._progress.print_message(f"hpctrain: {sentence}")
        if loaded is None:
            refuse_restart_from_zero(self._context, self._manager.folder, broken)
        else:
            self._restore(loaded, begun, [*aside, *broken])
        self.copies.restart()

    def _restore(self, loaded: LoadedCheckpoint, begun: float, broken: Sequence[str]) -> None:
        self._state.load(loaded)
        # Imported checkpoints have no random state.
        new_seed = (self._settings.seed, "rank", self._context.ranks.rank, "step", loaded.step)
        rng.resume_rng_state(loaded.rank_state, *new_seed)
        self._log.write_resumed(loaded.step, loaded.path, time.monotonic() - begun, broken)
        self._progress.print_message(f"resumed after step {loaded.step} from {loaded.path}")

    def finish_pending(self) -> str | None:
        """Wait for the save in flight; return the path of the newest finite checkpoint (collective)."""
        if self._manager is None:
            return None
        self._manager.wait()
        self._manager.collect_finished()
        newest = _find_finite(self._manager.folder) if self._context.ranks.is_main else None
        path: str | None = self._context.broadcast_from_main(newest)
        return path

    def add_score(self) -> None:
        """Add the score of the resumed state if it was validated after the resume (collective)."""
        if self._manager is not None:
            self._manager.add_score()

    def save_and_exit(self) -> NoReturn:
        """Save as much as the deadline allows, and exit after a stop signal (collective)."""
        # Slurm decides which ranks receive a signal; this rank may not receive it.
        gathered = self._context.all_gather(self._parts.stop.signal_name)
        step, signal_name = self._state.step, next(filter(None, gathered), None)
        if self._manager is None:
            self._progress.print_message(
                f"stopping after step {step}; the state is not saved because there is no run folder"
            )
        else:
            saved = self._save_within_deadline(self._manager, signal_name)
            self._log.write_event("signal", signal=signal_name, step=step, saved=saved)
            if saved:
                self._progress.print_message(
                    f"stopping after step {step}; the checkpoint of this step is saved"
                )
        raise SystemExit(EXIT_CONTINUE)

    def _save_within_deadline(self, manager: CheckpointManager, signal_name: str | None) -> bool:
        """Save within the deadline; on rank 0, return True if this step's state is in the run folder."""
        manager.collect_finished()
        for_requeue = self._context.broadcast_from_main(self._log.is_asked_to_requeue())
        left_s = self._context.all_reduce_min(self._deadline.left_s(for_requeue=for_requeue))
        ends_at = time.monotonic() + min(left_s, MAX_SAVE_S)
        write_s = manager.write_s
        plan = FinalSavePlan(
            self._context.broadcast_from_main(plan_final_save(left_s, write_s, manager.in_flight_s).value)
        )
        if plan in (FinalSavePlan.REPLACE_PENDING_SAVE, FinalSavePlan.NONE):
            manager.abandon()
        if plan in (FinalSavePlan.REPLACE_PENDING_SAVE, FinalSavePlan.AFTER_PENDING_SAVE):
            manager.async_save(direct=True)  # the next attempt may use other nodes
        elif write_s is not None:
            self._progress.print_message(
                f"hpctrain: After {signal_name}, only {max(0.0, left_s):.0f} s remain before the process "
                f"is killed, but a save takes {write_s:.0f} s. The state after step {self._state.step} is "
                "not saved. Earlier checkpoints are intact."
            )
        finished = manager.wait(ends_at - time.monotonic())
        saved, disk_wait = manager.collect_finished(), None
        while self._context.all_reduce_min(float(manager.found_disk_full)):
            disk_wait = disk_wait or manager.make_disk_wait()
            if not disk_wait.wait(lambda: min(self._left_to_begin_s(), ends_at - time.monotonic())):
                break
            manager.async_save(direct=True)
            finished = manager.wait(ends_at - time.monotonic())
            saved += manager.collect_finished()
        if not finished:
            self._progress.print_message(
                f"hpctrain: The save was aborted, because it did not finish in time after {signal_name}. "
                "Earlier checkpoints are intact."
            )
            manager.abandon()
        saved += [*manager.collect_finished(), *manager.close(max(0.0, ends_at - time.monotonic()))]
        return any(save.step == self._state.step and manager.is_shared(save) for save in saved)


def refuse_restart_from_zero(context: DistributedContext, folder: Path, broken: list[str]) -> None:
    """Raise an error if all checkpoints are damaged, instead of starting again from step 0 (collective)."""
    aside = context.broadcast_from_main(
        sorted(map(str, folder.glob("step-*.broken-*"))) if context.ranks.is_main else []
    )
    if aside:
        raise UserError(
            f"No checkpoint in {folder} is complete, so training would start over at step 0. "
            f"{' '.join(broken) or 'Damaged checkpoints: ' + ', '.join(aside) + '.'} Restore the missing "
            "files and remove '.broken-N' from the folder names, or import a checkpoint (hpctrain "
            "checkpoints import). To start over, delete the damaged checkpoints, or use another --run-dir."
        )


def is_trained(modules: Mapping[str, nn.Module | None]) -> Callable[[str], bool]:
    """Return a test for the keys of parameters and optimizer states; buffers may be infinite."""
    prefixes = tuple(f"{STATE_KEY}/{name}/" for name in modules)
    buffers = {
        f"{STATE_KEY}/{name}/{buffer}"
        for name, module in modules.items()
        if module is not None
        for buffer, _ in module.named_buffers()
    }
    return lambda key: key.startswith(prefixes) and key not in buffers


def _find_finite(folder: Path) -> str | None:
    for step in committed_steps(folder):
        path = folder / checkpoint_folder_name(step)
        with suppress(CheckpointError):
            if Manifest.read(path).finite is not False:
                return str(path)
    return None


def _node_mtbf_s(environ: Mapping[str, str]) -> float:
    text = environ.get(NODE_MTBF_VARIABLE) or str(NODE_MTBF_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(
            f"{NODE_MTBF_VARIABLE} is {text!r}, but must be a positive number of seconds: the mean time "
            "between failures of a node."
        )
    return seconds


class StopDeadline:
    def __init__(self, environ: Mapping[str, str], stop: StopFlag) -> None:
        self._stop = stop
        self._seconds = read_stop_grace(environ)

    def left_s(self, *, for_requeue: bool = False) -> float:
        """Return the seconds until this rank is killed; infinite if unknown, or without a stop signal."""
        if self._stop.signal_name is None:
            return math.inf
        name = REQUEUE_GRACE_KEY if for_requeue else self._stop.signal_name
        return self._stop.received_at + self._seconds.get(name, math.inf) - time.monotonic()


class FinalSavePlan(Enum):
    AFTER_PENDING_SAVE = "finish the save in flight, then save"
    REPLACE_PENDING_SAVE = "abort the save in flight, then save"
    PENDING_SAVE_ONLY = "finish the save in flight; there is no time for another save"
    NONE = "no time for a save"


def plan_final_save(left_s: float, write_s: float | None, in_flight_s: float | None) -> FinalSavePlan:
    """Return the plan that fits into the remaining time; otherwise, the newest checkpoint is kept."""
    if write_s is None:
        return FinalSavePlan.AFTER_PENDING_SAVE
    whole_s = longest_save_s(write_s)
    rest_s = 0.0 if in_flight_s is None else max(SAVE_MARGIN_S, whole_s - in_flight_s)
    if rest_s + whole_s <= left_s:
        return FinalSavePlan.AFTER_PENDING_SAVE
    if whole_s <= left_s:
        return FinalSavePlan.REPLACE_PENDING_SAVE
    if in_flight_s is not None and rest_s <= left_s:
        return FinalSavePlan.PENDING_SAVE_ONLY
    return FinalSavePlan.NONE
