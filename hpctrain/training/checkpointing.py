"""When a training saves, how it starts from what was saved, and how it leaves when it is told to."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hpctrain.checkpoint.interval import NODE_MTBF_S, Interruptions
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.rundir import NODE_MTBF_VARIABLE, RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.training import rng
from hpctrain.training.cadence import CheckpointCadence
from hpctrain.training.grace import Grace, LastSave, plan_last_save
from hpctrain.training.progress import Progress
from hpctrain.training.run_log import RunLog
from hpctrain.training.saves import LONGEST_SAVE_S, Saves
from hpctrain.training.settings import Settings
from hpctrain.training.state import TrainingState


class Checkpointing:
    """The checkpoints of one training. Without a run folder nothing is saved and nothing is found.

    Use as a context manager: what is being written at the end of the block is finished, or abandoned where
    the block ended with an error, for the other ranks may then be gone.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        settings: Settings,
        team: Team,
        run: RunDir | None,
        log: RunLog | None,
        progress: Progress,
        environ: Mapping[str, str],
        stop: StopFlag,
    ) -> None:
        """Look at the checkpoints of `run`. All ranks must call this.

        Raises:
            UserError: a variable of the environment is not what it should be.
        """
        self._state, self._settings, self._team = state, settings, team
        self._log, self._progress, self._stop = log, progress, stop
        self._grace = Grace(environ, stop)
        is_main = team.ranks.is_main
        self._cadence = CheckpointCadence(
            settings.checkpoint_every,
            num_nodes=team.ranks.num_nodes,
            node_mtbf_s=_node_mtbf_s(environ),
            history=Interruptions.of(run.read_events()) if run is not None and is_main else None,
        )
        self._saves: Saves | None = None
        self._run_checkpoints = Path() if run is None else run.checkpoints
        self._prepared = False
        if run is not None and log is not None:
            store = CheckpointStore(
                run.checkpoints,
                team.control,
                retention=settings.retention,
                second_tier=settings.second_tier(environ),
            )
            self._saves = Saves(
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
        """See how saves in the background ended, and whether this rank wants a checkpoint soon.

        Only rank 0's wish counts; it goes by the clock. All ranks must call this.
        """
        if self._saves is None:
            return False
        if not self._prepared:  # The optimizers have a state from the first step on.
            self._prepared = True
            self._saves.prepare()
        self._saves.settle()
        return self._team.ranks.is_main and self._cadence.wishes()

    def due(self) -> bool:
        """Whether a checkpoint is due after this step: by its number, by its score, or as the last one."""
        state = self._state
        scored = self._settings.keep_best > 0 and state.validated_step == state.step > 0
        return state.finished or scored or self._cadence.due(state.step)

    def save(self) -> None:
        """Save the state after this step. All ranks must call this.

        But for the last step's, a save that fails is said, and training goes on.

        Raises:
            CheckpointError: the last step's state could not be saved: without it the run has no result.
            UserError: the metric by which the best checkpoints are kept is not there.
        """
        if self._saves is None:
            return
        if self._state.finished:
            self._saves.save_result()
        elif self._team.from_main(self._team.ranks.is_main and self._saves.may_begin()):
            self._saves.begin()
            if not self._settings.checkpoint_async:
                self._saves.finish()
                self._saves.settle()

    def resume(self) -> None:
        """Load the newest whole checkpoint of the run, if there is one. All ranks must call this.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
            CheckpointError: the state of this training holds what a checkpoint cannot keep.
            UserError: there were checkpoints, and none of them is whole.
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
        if loaded.rank_state:  # What was imported has none.
            rng.restore(loaded.rank_state)
        else:
            rank = self._team.ranks.rank
            rng.seed_all(rng.derived_seed(self._settings.seed, "rank", rank, "step", loaded.step))
        self._log.event(
            "resumed",
            step=loaded.step,
            checkpoint=str(loaded.path),
            broken=broken,
            seconds=time.monotonic() - begun,
        )
        self._progress.say(f"resumed after step {loaded.step} from {loaded.path}")

    def _refuse_to_begin_anew(self, broken: list[str]) -> None:
        """Nobody who has checkpoints wants all of it trained again, unasked. All ranks must call this."""
        folder, is_main = self._run_checkpoints, self._team.ranks.is_main
        aside = self._team.from_main(sorted(map(str, folder.glob("step-*.broken-*"))) if is_main else [])
        if broken or aside:
            raise UserError(
                f"No checkpoint in {folder} is whole, and training would begin anew, at step 0. "
                f"{' '.join(broken) or 'Set aside: ' + ', '.join(aside) + '.'} Put back what is missing and "
                "take '.broken-N' off the folder's name, or bring in a checkpoint from elsewhere (hpctrain "
                "checkpoints import). To begin anew, delete those folders, or use another --run-dir."
            )

    def add_score(self) -> None:
        """Tell how good the resumed state is, where it was validated only now. All ranks must call this.

        Raises:
            UserError: the metric by which the best checkpoints are kept is not there.
        """
        if self._saves is not None:
            self._saves.add_score()

    def leave(self) -> NoReturn:
        """Save what fits into the grace, and leave: the job was told to stop. All ranks must call this.

        Raises:
            SystemExit: with code 75, always.
        """
        # Which ranks a signal reaches is Slurm's affair; it may not have been this one.
        told = self._team.gather(self._stop.signal_name)
        step, signal_name = self._state.step, next(filter(None, told), None)
        if self._saves is None or self._log is None:
            self._progress.say(f"stopping after step {step}; nothing is saved without a run folder")
        else:
            saved = self._save_before_the_end(self._saves, signal_name)
            self._log.event("signal", signal=signal_name, step=step, saved=saved)
            if saved:
                self._progress.say(f"stopping after step {step}, which is saved")
        raise SystemExit(EXIT_CONTINUE)

    def _save_before_the_end(self, saves: Saves, signal_name: str | None) -> bool:
        """Tells, on rank 0, whether the state after this very step lies in the run folder."""
        saves.settle()
        for_requeue = self._team.from_main(self._log is not None and self._log.is_asked_to_requeue())
        left_s = self._team.lowest(self._grace.left_s(for_requeue=for_requeue))
        ends_at = time.monotonic() + min(left_s, LONGEST_SAVE_S)
        write_s = saves.write_s
        plan = self._team.from_main(plan_last_save(left_s, write_s, saves.in_flight_s))
        if plan in (LastSave.IN_ITS_PLACE, LastSave.NONE):
            saves.abandon()
        if plan in (LastSave.IN_ITS_PLACE, LastSave.AFTER_THE_ONE_IN_FLIGHT):
            saves.begin()
        elif write_s is not None:
            self._progress.say(
                f"hpctrain: {signal_name} leaves {max(0.0, left_s):.0f} s, and saving takes {write_s:.0f} s: "
                f"the state after step {self._state.step} is not saved. The newest checkpoint stands."
            )
        if not saves.finish(ends_at - time.monotonic()):
            self._progress.say(
                f"hpctrain: the time that {signal_name} leaves is over, and saving has not ended: "
                "it is given up. The newest checkpoint stands."
            )
            saves.abandon()
        # With a fast folder, what lies there is copied to the run folder now: the next nodes may be others.
        saved = [*saves.settle(), *saves.close(max(0.0, ends_at - time.monotonic()))]
        return any(one.step == self._state.step and saves.is_shared(one) for one in saved)


def _node_mtbf_s(environ: Mapping[str, str]) -> float:
    text = environ.get(NODE_MTBF_VARIABLE) or str(NODE_MTBF_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(
            f"{NODE_MTBF_VARIABLE} is {text!r}; give the seconds between two interruptions of a node."
        )
    return seconds
