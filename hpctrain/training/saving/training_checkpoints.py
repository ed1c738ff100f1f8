"""Save during training, resume from a checkpoint, and exit after a stop signal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

from torch import nn

from hpctrain.checkpoint.find_latest_valid import not_finite_problem
from hpctrain.checkpoint.format.manifest import Manifest, committed_steps
from hpctrain.checkpoint.format.state_tree import STATE_KEY, split_tree
from hpctrain.checkpoint.interval import NODE_MTBF_S, InterruptionHistory, longest_save_s
from hpctrain.checkpoint.io.retention import KEEP_ALL
from hpctrain.checkpoint.store import (
    IO_TIMEOUT_S,
    CheckpointStore,
    CommittedSave,
    LoadedCheckpoint,
    TierCopyFailed,
)
from hpctrain.errors import EXIT_CONTINUE, BadLoss, CheckpointError, DiskFull, SilentCorruption, UserError
from hpctrain.record_types import RankPhase
from hpctrain.rundir import NODE_MTBF_VARIABLE, VERIFIED_STEP_VARIABLE, checkpoint_folder_name
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.signal_recorder import read_stop_grace
from hpctrain.training.base import rng
from hpctrain.training.components import Components
from hpctrain.training.observe.loss_guard import read_excluded_steps
from hpctrain.training.saving.checkpoint_schedule import (
    CheckpointSchedule,
    DiskSpaceWait,
    FinalSavePlan,
    VerificationSteps,
    plan_final_save,
    seconds_until_kill,
)
from hpctrain.training.saving.state_copies import StateCopies
from hpctrain.training.saving.unsaved_objects import UnsavedNumbers

#: Time after which a save is considered stuck.
MAX_SAVE_S = 3600.0
#: Minimum wait for a save in flight, and multiple of the previous write time. Training waits for the longer
#: of both; then, a due state is skipped.
_MAX_WAIT_S, _LATEST_FACTOR = 60.0, 3.0
#: The limit if the previous save failed.
_WAIT_IN_TROUBLE_S = 5.0


class _InFlight(NamedTuple):
    step: int
    since: float
    stall_s: float


class TrainingCheckpoints:
    """Checkpoints of a training run, one save at a time to limit memory; all methods are collective."""

    def __init__(self, components: Components, environ: Mapping[str, str]) -> None:
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
        self._grace_s = read_stop_grace(environ)
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
        self._has_resumed = self._is_prepared = self._is_closed = False
        limit = environ.get(VERIFIED_STEP_VARIABLE)
        self._resume_limit = int(limit) if limit else None
        self._in_flight: _InFlight | None = None
        #: Step of a save that was reported to take too long.
        self._overdue: int | None = None
        #: Seconds until the latest checkpoint was in the run folder; None before the first save.
        self._write_s: float | None = None
        self._found_disk_full = False
        #: Until the first save; only on rank 0.
        self._unsaved_numbers: UnsavedNumbers | None = None
        self._store: CheckpointStore | None = None
        if run is not None:
            self._folder = run.checkpoints
            self._store = CheckpointStore(
                run.checkpoints,
                components.context.cpu_group,
                retention=KEEP_ALL if self._verification else components.settings.retention,
                second_tier=None if self._verification else components.settings.second_tier(environ),
                records=(run.metrics, run.events),
                checked=checked,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All ranks raise these errors together.
        ends_together = kind is None or issubclass(kind, (BadLoss, SilentCorruption))
        if ends_together or issubclass(kind or BaseException, SystemExit):
            self.copies.close()
        if self._store is None:
            return
        if ends_together:
            self._close(self._store)
        elif not self._is_closed:
            self._store.abandon()
        self._log.flush()

    def save_requested(self) -> bool:
        """Record completed saves; return true if this rank requests a checkpoint soon."""
        if self._store is None:
            return False
        if not self._is_prepared:  # optimizers have a state only after the first step
            self._is_prepared = True
            with suppress(CheckpointError):  # `async_save` raises and reports the error again
                self._store.prepare(self._state.tree(), rng.capture_rng_state())
        self._collect_finished(self._store)
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
        """Save the state after this step; only a failure after the last step is an error."""
        if (store := self._store) is None:
            return
        if self._state.finished:
            self._save_result(store)
        elif self._verification is not None and self._state.step == self._verification.last:
            self._save_result(store)
            self._close(store)
            assert self._log.run is not None
            self._verification.end_run(self._log.run, self._context)
        elif self._verification is None or self._state.step in self._verification.saved:
            is_main = self._context.ranks.is_main
            if self._context.broadcast_from_main(is_main and self._can_begin(store)):
                self._async_save(store)
                if not self._settings.checkpoint_async:
                    store.wait(MAX_SAVE_S)
                    self._collect_finished(store)

    def resume(self) -> None:
        if self._store is None:
            return
        split_tree(self._state.tree(), "state")  # rejects values that a checkpoint cannot store
        begun = time.monotonic()
        aside: list[str] = []
        if self._resume_limit is not None:
            # A later rollback may use the checkpoints of this attempt.
            aside = self._store.set_aside_after(self._resume_limit)
        if not self._has_resumed and self.copies.folder is not None:
            problem = self._store.commit_newest_copy(self.copies.folder, self._resume_limit)
            aside += [problem] if problem else []
        if not self._has_resumed and self._context.ranks.is_main:
            self._unsaved_numbers = UnsavedNumbers([self._parts.module], self._parts.callbacks)
        self._resume_limit, self._has_resumed = None, True
        loaded, broken = self._store.load_newest(self._state.template())
        for sentence in (*aside, *broken):
            self._progress.print_message(f"hpctrain: {sentence}")
        if loaded is None:
            refuse_restart_from_zero(self._context, self._folder, broken)
        else:
            self._restore(loaded, begun, [*aside, *broken])
        self.copies.restart()

    def finish_pending(self) -> str | None:
        """Wait for the save in flight; return the path of the newest finite checkpoint."""
        if self._store is None:
            return None
        self._store.wait(MAX_SAVE_S)
        self._collect_finished(self._store)
        newest = _find_finite(self._folder) if self._context.ranks.is_main else None
        path: str | None = self._context.broadcast_from_main(newest)
        return path

    def add_score(self) -> None:
        """Add the score of the resumed state if it was validated after the resume."""
        if self._store is None or (score := self._score()) is None or not self._context.ranks.is_main:
            return
        try:
            self._store.add_score(self._state.step, score)
        except (CheckpointError, OSError) as error:
            self._progress.print_message(
                f"hpctrain: cannot record step {self._state.step} as a candidate for the best "
                f"checkpoint: {error}"
            )

    def save_and_exit(self) -> NoReturn:
        """Save as much as the deadline allows, and exit after a stop signal."""
        activity.set_phase(RankPhase.SAVE)
        # Slurm decides which ranks receive a signal; this rank may not receive it.
        gathered = self._context.all_gather(self._parts.stop.signal_name)
        step, signal_name = self._state.step, next(filter(None, gathered), None)
        if self._store is None:
            self._progress.print_message(
                f"stopping after step {step}; the state is not saved because there is no run folder"
            )
        else:
            saved = self._save_within_deadline(self._store, signal_name)
            self._log.write_event("signal", signal=signal_name, step=step, saved=saved)
            if saved:
                self._progress.print_message(
                    f"stopping after step {step}; the checkpoint of this step is saved"
                )
        raise SystemExit(EXIT_CONTINUE)

    def _restore(self, loaded: LoadedCheckpoint, begun: float, broken: Sequence[str]) -> None:
        self._state.load(loaded)
        # Imported checkpoints have no random state.
        new_seed = (self._settings.seed, "rank", self._context.ranks.rank, "step", loaded.step)
        rng.resume_rng_state(loaded.rank_state, *new_seed)
        self._log.write_resumed(loaded.step, loaded.path, time.monotonic() - begun, broken)
        self._progress.print_message(f"resumed after step {loaded.step} from {loaded.path}")

    def _can_begin(self, store: CheckpointStore) -> bool:
        """Wait for the save in flight, within a limit; return true if another save can begin (rank 0)."""
        if self._schedule.in_backoff:
            return False
        if self._in_flight is None:
            return True
        write_s = self._schedule.write_s
        limit_s = IO_TIMEOUT_S if write_s is None else max(_MAX_WAIT_S, _LATEST_FACTOR * write_s)
        if self._schedule.last_failed:
            limit_s = _WAIT_IN_TROUBLE_S
        if store.wait(max(0.0, self._in_flight.since + limit_s - time.monotonic())):
            return True
        if self._overdue != self._in_flight.step:
            self._overdue = self._in_flight.step
            cause = (
                f"The checkpoint of step {self._overdue} is still being written after "
                f"{time.monotonic() - self._in_flight.since:.0f} s, so the state after step "
                f"{self._state.step} is not saved."
            )
            self._report_failure(cause, " Until this write has ended, saves are skipped. Training continues.")
        return False

    def _async_save(self, store: CheckpointStore, *, direct: bool = False) -> None:
        begun = time.monotonic()
        store.wait(MAX_SAVE_S)
        self._collect_finished(store)
        store.async_save(**self._capture(), direct=direct)
        stall_s = time.monotonic() - begun
        self._in_flight = _InFlight(self._state.step, begun, stall_s)
        self._schedule.on_save_started(stall_s)

    def _save_result(self, store: CheckpointStore) -> None:
        """Save the state of the last step, and wait, also for space on a full disk."""
        disk_wait: DiskSpaceWait | None = None
        while True:
            store.wait(MAX_SAVE_S)
            self._collect_finished(store)
            try:
                return self._record_saved(store.save(**self._capture()))
            except DiskFull:
                disk_wait = disk_wait or DiskSpaceWait(self._parts, self._folder, store.state_bytes)
                if not disk_wait.wait(self._left_to_begin_s):
                    raise disk_wait.timeout_error() from None
            except CheckpointError as error:
                self._record_failure(error, "")
                raise

    def _save_within_deadline(self, store: CheckpointStore, signal_name: str | None) -> bool:
        """Save within the deadline; on rank 0, return True if this step's state is in the run folder."""
        self._collect_finished(store)
        key = self._context.broadcast_from_main(self._log.grace_key())
        left_s = self._context.all_reduce_min(seconds_until_kill(self._parts.stop, self._grace_s, key))
        ends_at = time.monotonic() + min(left_s, MAX_SAVE_S)
        write_s = self._write_s
        in_flight_s = None if self._in_flight is None else time.monotonic() - self._in_flight.since
        plan = FinalSavePlan(
            self._context.broadcast_from_main(plan_final_save(left_s, write_s, in_flight_s).value)
        )
        if plan in (FinalSavePlan.REPLACE_PENDING_SAVE, FinalSavePlan.NONE):
            store.abandon()
        if plan in (FinalSavePlan.REPLACE_PENDING_SAVE, FinalSavePlan.AFTER_PENDING_SAVE):
            self._async_save(store, direct=True)  # the next attempt may use other nodes
        elif write_s is not None:
            self._progress.print_message(
                f"hpctrain: After {signal_name}, only {max(0.0, left_s):.0f} s remain before the process "
                f"is killed, but a save takes {write_s:.0f} s. The state after step {self._state.step} is "
                "not saved. Earlier checkpoints are intact."
            )
        finished = store.wait(max(0.0, ends_at - time.monotonic()))
        saved, disk_wait = self._collect_finished(store), None
        while self._context.all_reduce_min(float(self._found_disk_full)):
            disk_wait = disk_wait or DiskSpaceWait(self._parts, self._folder, store.state_bytes)
            if not disk_wait.wait(lambda: min(self._left_to_begin_s(), ends_at - time.monotonic())):
                break
            self._async_save(store, direct=True)
            finished = store.wait(max(0.0, ends_at - time.monotonic()))
            saved += self._collect_finished(store)
        if not finished:
            self._progress.print_message(
                f"hpctrain: The save was aborted, because it did not finish in time after {signal_name}. "
                "Earlier checkpoints are intact."
            )
            store.abandon()
        saved += self._collect_finished(store)
        saved += self._close(store, max(0.0, ends_at - time.monotonic()))
        return any(save.step == self._state.step and save.path.parent == self._folder for save in saved)

    def _left_to_begin_s(self) -> float:
        """Return the seconds until a save must begin in order to complete before this rank is killed."""
        left_s = seconds_until_kill(self._parts.stop, self._grace_s, self._log.grace_key())
        return left_s - longest_save_s(self._write_s or 0.0)

    def _close(self, store: CheckpointStore, timeout_s: float | None = None) -> list[CommittedSave]:
        if self._is_closed:
            return []
        self._is_closed = True
        # The next attempt may use other nodes, so delete this node's local tier now.
        for note in store.close(clean=True, timeout_s=timeout_s):
            self._progress.print_message(f"hpctrain: {note}")
        return self._collect_finished(store)

    def _collect_finished(self, store: CheckpointStore) -> list[CommittedSave]:
        """Record and report the saves that ended since the last call; return the successful saves."""
        committed = []
        for outcome in store.collect_outcomes():
            if isinstance(outcome, CheckpointError):
                self._record_failure(outcome, " Training continues; earlier checkpoints are intact.")
            else:
                self._record_saved(outcome)
                committed.append(outcome)
        return committed

    def _capture(self) -> dict[str, Any]:
        unsaved, self._unsaved_numbers = self._unsaved_numbers, None
        if unsaved is not None and (message := unsaved.remark()):
            self._progress.print_message(f"hpctrain: {message}")
        return {
            "step": self._state.step,
            "state": self._state.tree(),
            "rank_state": rng.capture_rng_state(),
            "score": self._score(),
            "verified_step": self._state.verified_step,
        }

    def _record_saved(self, saved: CommittedSave) -> None:
        self._found_disk_full = False
        notes, fields = [*saved.notes], dict[str, Any]()
        if self._in_flight is not None and self._in_flight.step == saved.step:
            fields["stall_s"] = self._in_flight.stall_s
            self._in_flight = None
            self._schedule.on_save_committed(saved.seconds)
        is_shared = saved.path.parent == self._folder
        if is_shared:
            self._write_s = saved.seconds
            self._schedule.on_reached_run_folder()
        if saved.finite is False:
            fields["finite"] = False
            notes.append(not_finite_problem(saved.path))
        if saved.score is not None:
            fields |= {"score": saved.score, "metric": self._settings.monitor, "mode": self._settings.mode}
        for note in notes:
            self._progress.print_message(f"hpctrain: {note}")
        tier = "shared" if is_shared else "local"
        self._log.write_checkpoint(
            saved.step, saved.path, saved.total_bytes, saved.seconds, tier=tier, **fields
        )

    def _record_failure(self, error: CheckpointError, reassurance: str) -> None:
        if not isinstance(error, TierCopyFailed):
            self._in_flight = None
        # A failed copy to the run folder may belong to a save before the save in flight.
        if self._in_flight is None:
            self._found_disk_full = isinstance(error, DiskFull)
            self._schedule.on_save_failed()
        self._report_failure(str(error), reassurance)

    def _report_failure(self, cause: str, reassurance: str) -> None:
        self._log.write_event("failure", cause=cause)
        self._progress.print_message(f"hpctrain: {cause.rstrip('.')}.{reassurance}")

    def _score(self) -> float | None:
        """Return the state's score; None without `keep_best`, or if this step was not validated."""
        settings, state = self._settings, self._state
        if not settings.keep_best:
            return None
        if settings.monitor not in state.latest and state.validated_step == state.step:
            raise UserError(
                f"monitor is {settings.monitor!r} (for keep_best={settings.keep_best}), but the "
                f"metrics of step {state.step} are {', '.join(map(repr, sorted(state.latest)))}. Set monitor "
                f"to one of these metrics, or return {settings.monitor!r} from validation_step."
            )
        return state.latest.get(settings.monitor)


def refuse_restart_from_zero(context: DistributedContext, folder: Path, broken: list[str]) -> None:
    """Collective. Raise an error if all checkpoints are damaged, instead of starting again from step 0."""
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
