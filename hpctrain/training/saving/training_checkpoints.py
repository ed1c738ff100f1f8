"""Saving during a training, resuming from a checkpoint, and leaving after a stop signal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hpctrain.checkpoint.interval import NODE_MTBF_S, InterruptionHistory
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import EXIT_CONTINUE, DiskFull, UserError
from hpctrain.rundir import NODE_MTBF_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.base import rng
from hpctrain.training.observe.progress import Progress
from hpctrain.training.observe.run_writer import RunWriter
from hpctrain.training.saving.checkpoint_manager import MAX_SAVE_S, CheckpointManager
from hpctrain.training.saving.checkpoint_schedule import CheckpointSchedule
from hpctrain.training.saving.disk_space_wait import DiskSpaceWait
from hpctrain.training.saving.stop_deadline import (
    FinalSavePlan,
    StopDeadline,
    longest_save_s,
    plan_final_save,
)
from hpctrain.training.saving.training_state import TrainingState
from hpctrain.training.trainer_config import TrainerConfig


class TrainingCheckpoints:
    """Checkpoints of one training. Without a run folder, it saves and loads nothing.

    Use as a context manager. On exit it finishes the save in flight, or abandons it after an error, because
    the other ranks may be gone.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        settings: TrainerConfig,
        team: DistributedContext,
        run: RunDir | None,
        log: RunWriter | None,
        progress: Progress,
        environ: Mapping[str, str],
        stop: StopFlag,
    ) -> None:
        """Inspect the checkpoints of `run`. All ranks must call this.

        Raises:
            UserError: an environment variable is invalid, or the run cannot be recorded.
        """
        if run is not None:
            run.check_records()
        self._state, self._settings, self._team = state, settings, team
        self._log, self._progress, self._stop = log, progress, stop
        self._grace = StopDeadline(environ, stop)
        is_main = team.ranks.is_main
        self._cadence = CheckpointSchedule(
            settings.checkpoint_every,
            num_nodes=team.ranks.num_nodes,
            node_mtbf_s=_node_mtbf_s(environ),
            history=InterruptionHistory.of(run.read_events()) if run is not None and is_main else None,
        )
        self._saves: CheckpointManager | None = None
        self._run_checkpoints = Path() if run is None else run.checkpoints
        self._prepared = False
        if run is not None and log is not None:
            store = CheckpointStore(
                run.checkpoints,
                team.control,
                retention=settings.retention,
                second_tier=settings.second_tier(environ),
                records=(run.metrics, run.events),
            )
            self._saves = CheckpointManager(
                store,
                state,
                self._cadence,
                run=run,
                log=log,
                progress=progress,
                settings=settings,
                is_main=is_main,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._saves is None or self._log is None:
            return
        if kind is None:
            self._saves.close()
        else:
            self._saves.abandon()
        self._log.flush()

    def wished(self) -> bool:
        """Record completed saves; True if this rank requests a checkpoint soon.

        Only rank 0 requests one, by its clock. All ranks must call this.
        """
        if self._saves is None:
            return False
        if not self._prepared:  # optimizers have a state only after the first step
            self._prepared = True
            self._saves.prepare()
        self._saves.settle()
        return self._team.ranks.is_main and self._cadence.wishes()

    def due(self) -> bool:
        """True if a checkpoint is due after this step: by its number, for its score, or as the last one."""
        state = self._state
        scored = self._settings.keep_best > 0 and state.validated_step == state.step > 0
        return state.finished or scored or self._cadence.due(state.step)

    def save(self) -> None:
        """Save the state after this step. All ranks must call this.

        A failed save is reported and training continues, except after the last step.

        Raises:
            CheckpointError: the last step's state could not be saved: without it the run has no result.
            UserError: the metric that selects the best checkpoints is missing.
        """
        if self._saves is None:
            return
        if self._state.finished:
            self._save_result(self._saves)
        elif self._team.from_main(self._team.ranks.is_main and self._saves.may_begin()):
            self._saves.begin()
            if not self._settings.checkpoint_async:
                self._saves.finish()
                self._saves.settle()

    def _save_result(self, saves: CheckpointManager) -> None:
        """Save the last step's state; wait for space if the disk is full."""
        room: DiskSpaceWait | None = None
        while True:
            try:
                return saves.save_result()
            except DiskFull:
                room = room or self._room(saves)
                if not room.wait(self._left_to_begin_s):
                    raise room.refusal() from None

    def _room(self, saves: CheckpointManager) -> DiskSpaceWait:
        assert self._log is not None
        say = self._progress.say
        return DiskSpaceWait(self._team, saves, self._log, say, self._run_checkpoints, self._state.step)

    def _left_to_begin_s(self) -> float:
        """Return the seconds within which a save must begin to end before this rank is killed."""
        for_requeue = self._log is not None and self._log.is_asked_to_requeue()
        write_s = None if self._saves is None else self._saves.write_s
        return self._grace.left_s(for_requeue=for_requeue) - longest_save_s(write_s or 0.0)

    def resume(self) -> None:
        """Load the newest complete checkpoint of the run, if any. All ranks must call this.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
            CheckpointError: the state of this training contains something that a checkpoint cannot keep.
            UserError: there were checkpoints, but none is complete.
        """
        if self._saves is None or self._log is None:
            return
        self._saves.check()
        begun = time.monotonic()
        loaded, broken = self._saves.load()
        for sentence in broken:
            self._progress.say(f"hpctrain: {sentence}")
        if loaded is None:
            self._refuse_to_begin_anew(broken)
            return
        self._state.load(loaded)
        if loaded.rank_state:  # imported checkpoints have none
            rng.restore_rng_state(loaded.rank_state)
        else:
            rank = self._team.ranks.rank
            rng.seed_all(rng.derive_seed(self._settings.seed, "rank", rank, "step", loaded.step))
        self._log.event(
            "resumed",
            step=loaded.step,
            checkpoint=str(loaded.path),
            broken=broken,
            seconds=time.monotonic() - begun,
        )
        self._progress.say(f"resumed after step {loaded.step} from {loaded.path}")

    def _refuse_to_begin_anew(self, broken: list[str]) -> None:
        """Raise if all checkpoints are broken, instead of training again from step 0.

        All ranks must call this.
        """
        folder, is_main = self._run_checkpoints, self._team.ranks.is_main
        aside = self._team.from_main(sorted(map(str, folder.glob("step-*.broken-*"))) if is_main else [])
        if broken or aside:
            raise UserError(
                f"No checkpoint in {folder} is complete, so training would start over at step 0. "
                f"{' '.join(broken) or 'Set aside: ' + ', '.join(aside) + '.'} Restore the missing files and "
                "remove '.broken-N' from the folder's name, or import a checkpoint (hpctrain checkpoints "
                "import). To start over, delete those folders, or use another --run-dir."
            )

    def add_score(self) -> None:
        """Add the score of the resumed state if it was validated only now. All ranks must call this.

        Raises:
            UserError: the metric that selects the best checkpoints is missing.
        """
        if self._saves is not None:
            self._saves.add_score()

    def leave(self) -> NoReturn:
        """Save as much as the deadline allows, and exit after a stop signal. All ranks must call this.

        Raises:
            SystemExit: with code 75, always.
        """
        # Slurm decides which ranks receive a signal; this rank may not be one of them.
        told = self._team.gather(self._stop.signal_name)
        step, signal_name = self._state.step, next(filter(None, told), None)
        if self._saves is None or self._log is None:
            self._progress.say(f"stopping after step {step}; nothing is saved because there is no run folder")
        else:
            saved = self._save_before_the_end(self._saves, signal_name)
            self._log.event("signal", signal=signal_name, step=step, saved=saved)
            if saved:
                self._progress.say(f"stopping after step {step}; its checkpoint is saved")
        raise SystemExit(EXIT_CONTINUE)

    def _save_before_the_end(self, saves: CheckpointManager, signal_name: str | None) -> bool:
        """Save within the deadline; on rank 0, return True if this step's state is in the run folder."""
        saves.settle()
        for_requeue = self._team.from_main(self._log is not None and self._log.is_asked_to_requeue())
        left_s = self._team.lowest(self._grace.left_s(for_requeue=for_requeue))
        ends_at = time.monotonic() + min(left_s, MAX_SAVE_S)
        write_s = saves.write_s
        plan = FinalSavePlan(self._team.from_main(plan_final_save(left_s, write_s, saves.in_flight_s).value))
        if plan in (FinalSavePlan.IN_ITS_PLACE, FinalSavePlan.NONE):
            saves.abandon()
        if plan in (FinalSavePlan.IN_ITS_PLACE, FinalSavePlan.AFTER_THE_ONE_IN_FLIGHT):
            saves.begin()
        elif write_s is not None:
            self._progress.say(
                f"hpctrain: {signal_name} leaves {max(0.0, left_s):.0f} s, but saving takes {write_s:.0f} s: "
                f"the state after step {self._state.step} is not saved. Earlier checkpoints are intact."
            )
        finished = saves.finish(ends_at - time.monotonic())
        saved, room = saves.settle(), None
        while self._team.lowest(float(saves.found_disk_full)):
            room = room or self._room(saves)
            if not room.wait(lambda: min(self._left_to_begin_s(), ends_at - time.monotonic())):
                break
            saves.begin()
            finished = saves.finish(ends_at - time.monotonic())
            saved += saves.settle()
        if not finished:
            self._progress.say(
                f"hpctrain: the time after {signal_name} ran out before the save finished; the save was "
                "abandoned. Earlier checkpoints are intact."
            )
            saves.abandon()
        # Copy the local tier to the run folder now, because the next attempt may use other nodes.
        saved += [*saves.settle(), *saves.close(max(0.0, ends_at - time.monotonic()))]
        return any(one.step == self._state.step and saves.is_shared(one) for one in saved)


def _node_mtbf_s(environ: Mapping[str, str]) -> float:
    text = environ.get(NODE_MTBF_VARIABLE) or str(NODE_MTBF_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(
            f"{NODE_MTBF_VARIABLE} is {text!r}; it must be the mean number of seconds between failures "
            "of a node."
        )
    return seconds
