"""When a training saves, what it says about it, and how it starts from what was saved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

from hpctrain.checkpoint.interval import NODE_MTBF_S, Interruptions
from hpctrain.checkpoint.store import CheckpointStore, Saved
from hpctrain.checkpoint.tree import split_tree
from hpctrain.errors import EXIT_CONTINUE, CheckpointError, UserError
from hpctrain.rundir import NODE_MTBF_VARIABLE, RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.training import rng
from hpctrain.training.cadence import CheckpointCadence
from hpctrain.training.grace import Grace, LastSave, plan_last_save
from hpctrain.training.progress import Progress
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.state import TrainingState

#: A save that takes longer than this is taken for stuck.
_LONGEST_SAVE_S = 3600.0


@dataclass(frozen=True)
class _InFlight:
    """A save that is being written."""

    step: int
    since: float
    stall_s: float


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
        self._in_flight: _InFlight | None = None
        self._prepared = self._closed = False
        self._folder = None if run is None else run.checkpoints
        self._store = (
            None
            if run is None
            else CheckpointStore(
                run.checkpoints,
                team.control,
                retention=settings.retention,
                second_tier=settings.second_tier(environ),
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None or self._log is None:
            return
        if kind is None:
            self._close()
        elif not self._closed:
            self._store.abandon()
        self._log.flush()

    def wished(self) -> bool:
        """See how saves in the background ended, and whether this rank wants a checkpoint soon.

        Only rank 0's wish counts; it goes by the clock.
        """
        if self._store is None:
            return False
        if not self._prepared:  # The optimizers have a state from the first step on.
            self._prepared = True
            self._store.prepare(self._state.tree(), rng.capture())
        self._settle()
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
        if self._store is None:
            return
        if self._state.finished:
            self._save_result(self._store)
        elif not self._team.from_main(self._cadence.rests):
            self._begin(self._store)
            if not self._settings.checkpoint_async:
                self._store.finish(_LONGEST_SAVE_S)
                self._settle()

    def resume(self) -> None:
        """Load the newest whole checkpoint of the run, if there is one. All ranks must call this.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
            CheckpointError: the state of this training holds what a checkpoint cannot keep.
        """
        if self._store is None or self._log is None:
            return
        split_tree(self._state.tree(), "state")  # Better now than at the first save, hours from here.
        loaded, broken = self._store.load_newest()
        for sentence in broken:
            self._progress.say(f"hpctrain: {sentence}")
        if loaded is None:
            if broken:
                self._log.event("resumed", step=0, checkpoint=None, broken=broken)
            return
        self._state.load(loaded)
        if loaded.rank_state:  # What was imported has none.
            rng.restore(loaded.rank_state)
        else:
            rank = self._team.ranks.rank
            rng.seed_all(rng.derived_seed(self._settings.seed, "rank", rank, "step", loaded.step))
        self._log.event("resumed", step=loaded.step, checkpoint=str(loaded.path), broken=broken)
        self._progress.say(f"resumed after step {loaded.step} from {loaded.path}")

    def leave(self) -> NoReturn:
        """Save and leave: the job was told to stop. All ranks must call this.

        Raises:
            SystemExit: with code 75, always.
        """
        step, signal_name = self._state.step, self._stop.signal_name
        if self._store is None or self._log is None:
            self._progress.say(f"stopping after step {step}; nothing is saved without a run folder")
            raise SystemExit(EXIT_CONTINUE)
        saved = self._save_before_the_end(self._store)
        self._log.event("signal", signal=signal_name, step=step, saved=saved)
        if saved:
            self._progress.say(f"stopping after step {step}, which is saved")
        self._close()
        raise SystemExit(EXIT_CONTINUE)

    def _begin(self, store: CheckpointStore) -> None:
        """Copy the state, which is written in the background from now on. All ranks must call this."""
        begun = time.monotonic()
        store.finish(_LONGEST_SAVE_S)  # One in flight at a time: memory is for one.
        self._settle()
        store.begin(self._state.step, self._state.tree(), rng.capture(), score=self._score())
        stall_s = time.monotonic() - begun
        self._in_flight = _InFlight(self._state.step, begun, stall_s)
        self._cadence.begun(stall_s)

    def _save_result(self, store: CheckpointStore) -> None:
        store.finish(_LONGEST_SAVE_S)
        self._settle()
        try:
            saved = store.save(self._state.step, self._state.tree(), rng.capture(), score=self._score())
        except CheckpointError as error:
            self._note_failure(error, "")
            raise
        self._note_saved(saved)

    def _save_before_the_end(self, store: CheckpointStore) -> bool:
        """Save what fits into the grace. Tells on rank 0 whether this very step was saved."""
        self._settle()
        in_flight_s = None if self._in_flight is None else time.monotonic() - self._in_flight.since
        left_s = self._team.lowest(self._grace.left_s())
        ends_at = time.monotonic() + min(left_s, _LONGEST_SAVE_S)
        write_s = self._cadence.write_s
        plan = self._team.from_main(plan_last_save(left_s, write_s, in_flight_s))
        if plan in (LastSave.IN_ITS_PLACE, LastSave.NONE):
            store.abandon()
        if plan in (LastSave.IN_ITS_PLACE, LastSave.AFTER_THE_ONE_IN_FLIGHT):
            self._begin(store)
        elif write_s is not None:
            self._progress.say(
                f"hpctrain: {self._stop.signal_name} leaves {left_s:.0f} s, and saving takes "
                f"{write_s:.0f} s: the state after step {self._state.step} is not saved. "
                "The newest checkpoint stands."
            )
        if not store.finish(ends_at - time.monotonic()):
            self._progress.say(
                f"hpctrain: saving has not ended before the time that {self._stop.signal_name} leaves is "
                "over: it is given up. The newest checkpoint stands."
            )
            store.abandon()
        return self._state.step in [saved.step for saved in self._settle()]

    def _settle(self) -> list[Saved]:
        """Write down and say how the saves ended that did so meanwhile."""
        ended = [] if self._store is None else self._store.finished()
        for end in ended:
            if isinstance(end, CheckpointError):
                self._note_failure(end, " Training goes on; the checkpoints before it stand.")
            else:
                self._note_saved(end)
        return [end for end in ended if isinstance(end, Saved)]

    def _note_saved(self, saved: Saved) -> None:
        for note in saved.notes:
            self._progress.say(f"hpctrain: {note}")
        stall: dict[str, float] = {}
        if self._in_flight is not None and self._in_flight.step == saved.step:
            stall, self._in_flight = {"stall_s": self._in_flight.stall_s}, None
            self._cadence.saved(saved.seconds)
        if self._log is not None:
            self._log.event(
                "checkpoint",
                step=saved.step,
                path=str(saved.path),
                tier="shared" if saved.path.parent == self._folder else "local",
                bytes=saved.total_bytes,
                seconds=saved.seconds,
                **stall,
                **self._score_of(saved),
            )

    def _note_failure(self, error: CheckpointError, comfort: str) -> None:
        self._in_flight = None
        self._cadence.failed()
        if self._log is not None:
            self._log.event("failure", cause=str(error))
        self._progress.say(f"hpctrain: {error}{comfort}")

    def _score(self) -> float | None:
        """What the retention of the best goes by.

        Raises:
            UserError: validation does not give that metric.
        """
        settings, state = self._settings, self._state
        if not settings.keep_best:
            return None
        if settings.best_metric not in state.latest and state.validated_step == state.step:
            raise UserError(
                f"best_metric is {settings.best_metric!r}, by which keep_best={settings.keep_best} is to go, "
                f"but step {state.step} has {', '.join(map(repr, sorted(state.latest)))}. "
                "Give one of these as best_metric, or let validation_step return it."
            )
        return state.latest.get(settings.best_metric)

    def _score_of(self, saved: Saved) -> dict[str, Any]:
        """What the record says of how good a checkpoint is."""
        if saved.score is None:
            return {}
        settings = self._settings
        return {"score": saved.score, "metric": settings.best_metric, "mode": settings.best_mode}

    def _close(self) -> None:
        """End what runs in the background. All ranks must call this."""
        assert self._store is not None
        self._closed = True
        for note in self._store.close(run_is_over=self._state.finished):
            self._progress.say(f"hpctrain: {note}")
        self._settle()


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
