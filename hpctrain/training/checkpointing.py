"""When a training saves, what it says about it, and how it starts from what was saved."""

from __future__ import annotations

from typing import NoReturn

from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import EXIT_CONTINUE, CheckpointError
from hpctrain.rundir import RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.training import rng
from hpctrain.training.cadence import CheckpointCadence
from hpctrain.training.progress import Progress
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.state import TrainingState


class Checkpointing:
    """The checkpoints of one training. Without a run folder nothing is saved and nothing is found."""

    def __init__(
        self,
        state: TrainingState,
        *,
        settings: Settings,
        team: Team,
        run: RunDir | None,
        log: RunLog | None,
        progress: Progress,
        last_step: int,
    ) -> None:
        self._state, self._seed, self._team = state, settings.seed, team
        self._log, self._progress, self._last_step = log, progress, last_step
        self._cadence = CheckpointCadence(settings.checkpoint_every, team.ranks.num_nodes)
        self._store = (
            None
            if run is None
            else CheckpointStore(
                run.checkpoints, team.control, retention=Retention(last=settings.keep_checkpoints)
            )
        )

    def wished(self) -> bool:
        """Whether this rank wants a checkpoint soon, by the clock; only rank 0's wish counts."""
        return self._team.ranks.is_main and self._cadence.wishes()

    def due(self) -> bool:
        """Whether a checkpoint is due after this step, by its number."""
        return self._state.step == self._last_step or self._cadence.due(self._state.step)

    def save(self) -> bool:
        """Save the state after this step; where that fails, say so and train on. All ranks must call this.

        Raises:
            CheckpointError: the last step's state could not be saved: without it the run has no result.
        """
        if self._store is None or self._log is None:
            return False
        step = self._state.step
        try:
            saved = self._store.save(step, self._state.tree(), rng.capture())
        except CheckpointError as error:
            self._log.event("failure", cause=str(error))
            if step == self._last_step:
                raise
            self._progress.say(f"hpctrain: {error} Training goes on; the checkpoints before it stand.")
            return False
        self._cadence.saved(saved.seconds)
        self._log.event(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            bytes=saved.total_bytes,
            seconds=saved.seconds,
        )
        return True

    def resume(self) -> None:
        """Load the newest whole checkpoint of the run, if there is one. All ranks must call this.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
        """
        if self._store is None or self._log is None:
            return
        loaded, broken = self._store.load_newest()
        for sentence in broken:
            self._progress.say(f"hpctrain: {sentence}")
        if loaded is None:
            if broken:
                self._log.event("resumed", step=0, checkpoint=None, broken=broken)
            return
        self._state.load(loaded)
        if loaded.rank_state is not None:
            rng.restore(loaded.rank_state)
        else:
            rank = self._team.ranks.rank
            rng.seed_all(rng.derived_seed(self._seed, "rank", rank, "step", loaded.step))
        self._log.event("resumed", step=loaded.step, checkpoint=str(loaded.path), broken=broken)
        self._progress.say(f"resumed after step {loaded.step} from {loaded.path}")

    def leave(self, signal_name: str | None) -> NoReturn:
        """Save and leave: the job was told to stop. All ranks must call this.

        Raises:
            SystemExit: with code 75, always.
        """
        saved, step = self.save(), self._state.step
        if self._log is None:
            self._progress.say(f"stopping after step {step}; nothing is saved without a run folder")
        else:
            self._log.event("signal", signal=signal_name, step=step, saved=saved)
        if saved:
            self._progress.say(f"stopping after step {step}, which is saved")
        raise SystemExit(EXIT_CONTINUE)
